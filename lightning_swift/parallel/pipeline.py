"""The module that takes the place of a Hugging Face model in a LightningModule and runs it as a pipeline."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from lightning_swift.errors import DataError, ModelError
from lightning_swift.parallel._pipeline_batch import PipelineBatch, prepare
from lightning_swift.parallel._pipeline_evaluation import evaluate
from lightning_swift.parallel._pipeline_generate import generate
from lightning_swift.parallel._pipeline_gradients import deposit, sum_tied, taken_gradients
from lightning_swift.parallel._pipeline_output import LogitsGatherer, PipelineOutput
from lightning_swift.parallel._pipeline_schedule import ScheduleBuilder
from lightning_swift.parallel.schedule import ScheduleSettings
from lightning_swift.parallel.sharding import reshard
from lightning_swift.parallel.stages import LossFunction, Stage

__all__ = ["GradientFix", "PipelinedModel", "global_name"]

GradientFix = Callable[[list[tuple[nn.Parameter, Tensor]]], None]

_STAGE = re.compile(r"(^|\.)stages\.\d+\.model\.")


def global_name(name: str) -> str:
    """The name that a parameter has without a pipeline, from its raw name below a :class:`PipelinedModel`."""
    return _STAGE.sub(r"\1", name)


class PipelinedModel(nn.Module):
    """Runs the stages of this rank in step with those of the other ranks of its pipeline.

    Called as the model is that it replaces, on every rank of the pipeline with the same batch. With gradients enabled
    the whole schedule, backward passes included, runs in the call; the loss that it returns gives the gradients to the
    parameters when its ``backward`` is called. The loss is the mean over all target tokens of the batch, however they
    are spread over microbatches, and the same on all ranks; 0 if there are no targets.

    Parameters have the names that they have without a pipeline, in ``named_modules``, ``named_parameters`` and
    ``state_dict``; each rank has those of its own stages. The two copies of a tied embedding of a V-shaped schedule,
    both on the first rank, have one name.

    Args:
        stages: The stages of this rank, ascending, as ``schedule.stage_ids`` numbers them.
        group: The ranks of this pipeline.
        schedule: How microbatches run through the stages.
        length_multiple: What sequences are padded to a multiple of on the right, and the number of parts that the
            hidden states between stages are cut into: the size of the tensor-parallel group under sequence parallelism.
        activation_dtype: Type of the hidden states between stages; None means that of the parameters.
        step_context: A context around all computation of a step, such as torch's ``loss_parallel``.
        loss_fn: Another loss than the model's own: a mean over the target tokens (those whose label, shifted by one, is
            not -100) from logits ``[rows, length, vocabulary]`` and labels ``[rows, length]`` of one microbatch.
        gather_logits: Give the logits of evaluations to all ranks.
        device: Where the stages compute; None means that of the first parameter.

    Attributes:
        gradient_fixes: Called once per schedule step, in order, with pairs of parameter and gradient. Gradients are in
            the layout of their parameters and are to be changed in place.
        on_backward: Called in each backward pass of a loss with the factor that the gradients are multiplied with.

    Raises:
        ModelError: The loss of the model cannot be computed in parts.
        ConfigurationError: The rules of the schedule are broken.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        group: dist.ProcessGroup,
        schedule: ScheduleSettings,
        length_multiple: int = 1,
        activation_dtype: torch.dtype | None = None,
        step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        loss_fn: LossFunction | None = None,
        gather_logits: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        schedule.check(dist.get_world_size(group))
        _check_loss(stages[0], loss_fn)
        self.stages = nn.ModuleList(stages)
        self.schedule, self.group, self.gather_logits = schedule, group, gather_logits
        self.gradient_fixes: list[GradientFix] = []
        self.on_backward: Callable[[Tensor], None] | None = None
        self._length_multiple, self._step_context = length_multiple, step_context
        self._activation_dtype, self._device = activation_dtype, device
        self._builder: ScheduleBuilder | None = None
        self._logits = LogitsGatherer(group, self._last_rank)
        self._warned, self._generations = False, 0
        for stage in stages:
            stage.sequence_shards, stage.loss_fn = length_multiple, loss_fn
        # Lightning notes the mode of each module by name and restores it after validation.
        self.training = stages[0].model.training

    @property
    def config(self) -> Any:
        """The configuration of the Hugging Face model."""
        return self._stages[0].pretrained.config

    @property
    def device(self) -> torch.device:
        """Where the stages compute."""
        return self._device or next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters, as the Hugging Face model says it."""
        dtype: torch.dtype = self._stages[0].pretrained.dtype
        return dtype

    @property
    def generation_config(self) -> Any:
        """Defaults of ``generate``, which may be changed."""
        return self._stages[0].pretrained.generation_config

    @property
    def activation_dtype(self) -> torch.dtype:
        """Type of the hidden states between stages."""
        # Packed weights of quantised layers are integers.
        return self._activation_dtype or next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def schedule_builds(self) -> tuple[int, float]:
        """How many times a schedule was built for a new shape, and the seconds that took together."""
        return (0, 0.0) if self._builder is None else (self._builder.builds, self._builder.build_seconds)

    @property
    def _stages(self) -> list[Stage]:
        return list(self.stages)  # type: ignore[arg-type]

    @property
    def _last_rank(self) -> int:
        pp = dist.get_world_size(self.group)
        return self.schedule.rank_of(self.schedule.n_stages(pp) - 1, pp)

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        """Loss, and with ``gather_logits`` in evaluations the logits, of a batch.

        Args:
            input_ids: ``[rows, length]``, as everything that follows.
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: Positions, which also tell packed sequences apart.
            labels: Targets, -100 where no loss is wanted; the model shifts them itself. Needed with gradients enabled.
            arguments: Other arguments of the model's forward; tensors with as many rows as ``input_ids`` are cut.

        Raises:
            ModelError: An argument that cannot work on pipeline stages.
            DataError: No labels, or tensors that do not fit; before any communication.
        """
        given = {**arguments, "attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        batch = self._prepared(input_ids, given)
        self._warn_of_padding(batch)
        if torch.is_grad_enabled():
            return self._train(batch)
        # Lightning evaluates in inference mode under NCCL; gathered FSDP parameters made in it could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            return self._evaluate(batch)

    def _prepared(self, input_ids: Tensor | None, arguments: dict[str, Any]) -> PipelineBatch:
        for stage in self._stages:
            stage.activation_dtype = self.activation_dtype
        return prepare(
            input_ids,
            arguments,
            microbatches=self.schedule.microbatches,
            length_multiple=self._length_multiple,
            config=self.config,
        )

    def _train(self, batch: PipelineBatch) -> PipelineOutput:
        if batch.labels is None:
            raise DataError(
                "the batch has no labels, which the loss needs.",
                where="pipelined model",
                fix="Let the data set return labels, or call the model under torch.no_grad() for its logits.",
            )
        # A forward pass without a backward pass may have left whole parameters where the shards are to be.
        reshard(self)
        with taken_gradients([p for p in self.parameters() if p.requires_grad]) as collected:
            losses = self._run_schedule(batch)
        sum_tied(self._stages, collected.pairs, self.schedule, self.group)
        for fix in self.gradient_fixes:
            fix(collected.pairs)
        anchor = torch.zeros((), device=batch.inputs.device, requires_grad=True)
        loss = deposit(anchor, self._shared_loss(losses, batch), collected.pairs, self.on_backward)
        return PipelineOutput.training(loss)

    def _run_schedule(self, batch: PipelineBatch) -> list[Tensor]:
        schedule = self._built().get(batch.inputs.shape[0] // self.schedule.microbatches, batch.inputs.shape[1])
        first = any(stage.first for stage in self._stages)
        last = any(stage.last for stage in self._stages)
        losses: list[Tensor] = []
        with self._step_context():
            schedule.step(
                *((batch.inputs,) if first else ()),
                target=batch.targets if last else None,
                losses=losses,
                return_outputs=False,
                **batch.keywords(),
            )
        return losses

    def _built(self) -> ScheduleBuilder:
        if self._builder is None:
            self._builder = ScheduleBuilder(
                self._stages,
                self.schedule,
                group=self.group,
                device=self.device,
                activation_dtype=self.activation_dtype,
            )
        return self._builder

    def _evaluate(self, batch: PipelineBatch) -> PipelineOutput:
        pairs = self._forward_only(batch, logits=self.gather_logits)
        loss = None if batch.labels is None else self._shared_loss([loss for loss, _ in pairs], batch)
        if not self.gather_logits:
            return PipelineOutput.evaluation(loss)
        return PipelineOutput.evaluation(loss, self._logits.gather([logits for _, logits in pairs], batch))

    def _forward_only(self, batch: PipelineBatch, *, logits: bool) -> list[tuple[Any, Any]]:
        """Loss and logits of each microbatch on the rank of the last stage; either may be None."""
        try:
            with self._step_context():
                results = evaluate(
                    self._stages,
                    batch,
                    self.schedule,
                    group=self.group,
                    activation_dtype=self.activation_dtype,
                    logits=logits,
                )
        finally:
            # No backward pass follows that would free the gathered parameters.
            reshard(self)
        return [result if isinstance(result, tuple) else (result, None) for result in results]

    def _next_logits(self, arguments: dict[str, Any]) -> Tensor:
        last = int(arguments.pop("logits_to_keep", 0)) or None
        batch = self._prepared(arguments.pop("input_ids"), arguments)
        with torch.inference_mode(False), torch.no_grad():
            pairs = self._forward_only(batch, logits=True)
            return self._logits.gather([logits for _, logits in pairs], batch, last=last)

    def _shared_loss(self, losses: Sequence[Tensor], batch: PipelineBatch) -> Tensor:
        """The sum of the last stage's losses, on all ranks."""
        total = torch.zeros((), device=batch.inputs.device)
        if losses:
            total = torch.stack([loss.detach().float().reshape(()) for loss in losses]).sum()
        dist.broadcast(total, group=self.group, group_src=self._last_rank)
        return total

    def _warn_of_padding(self, batch: PipelineBatch) -> None:
        if batch.rows < self.schedule.microbatches and not self._warned:
            self._warned = True
            warnings.warn(
                f"A batch has {batch.rows} rows for {self.schedule.microbatches} microbatches and is padded with rows "
                "that are computed for nothing: use larger batches or fewer microbatches.",
                stacklevel=3,
            )

    @override
    def __getattr__(self, name: str) -> Any:
        """Say why parts of the Hugging Face model are not here."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error}, which stands for the Hugging Face model here: each rank holds only its own stages of it. "
                "Change parts of the model where it is built, and choose parameters by their names in "
                "named_parameters(), which have not changed."
            ) from None

    @override
    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the stages by the names that they have without a pipeline."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for stage in self._stages:
            # The stage too, for what looks for modules by their kind: FSDP takes it for the root.
            yield prefix, stage
            yield from stage.model.named_modules(memo, prefix, remove_duplicate)

    @override
    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of the stages by the names that it has without a pipeline."""
        destination = {} if destination is None else destination
        for stage in self._stages:
            stage.model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torch goes on with the children, so the entries get the names that these have.
        for number, stage in enumerate(self._stages):
            for name in [name for name, _ in stage.model.state_dict(keep_vars=True).items()]:
                if prefix + name in state_dict:
                    state_dict[f"{prefix}stages.{number}.model.{name}"] = state_dict[prefix + name]
        for name in [name for name in state_dict if not name.startswith(f"{prefix}stages.")]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Continue prompts as ``generate`` of the Hugging Face model does, without a cache, on all ranks alike.

        Each new token costs a forward pass of the whole sequence. Arguments are those of Hugging Face; sampling
        depends on the prompt and on the number of calls, and not on the seed.
        """
        self._generations += 1
        return generate(self._stages[0].pretrained, self._next_logits, args, kwargs, self._generations)


def _check_loss(stage: Stage, loss_fn: LossFunction | None) -> None:
    if loss_fn is None and not stage.anatomy.counts_tokens:
        raise ModelError(
            f"the loss of {type(stage.pretrained).__name__} is no plain mean over tokens, so that it cannot be "
            "computed in parts.",
            where="pipelined model",
            fix="Give the strategy a loss_fn(logits, labels); for a mixture of experts set "
            "output_router_logits=False in the configuration.",
        )
