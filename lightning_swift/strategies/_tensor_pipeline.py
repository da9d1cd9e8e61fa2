"""The mesh engine with stages and tensor-parallel layers: what ``TensorPipelineStrategy`` is a preset of."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swift.checkpoint.layout import Manifest
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.gradients import OtherStages
from lightning_swift.parallel.mesh import MeshAxis, data_parallel_rank
from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.parallel.sharding import shard, would_only_copy
from lightning_swift.parallel.tensor import (
    TensorParallelReport,
    apply_tensor_parallel,
    partial_parameters,
    sum_partial_gradients,
)
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel
from lightning_swift.strategies._checkpoint_state import Index, LoadRequest
from lightning_swift.strategies._failures import FailureWatch
from lightning_swift.strategies._mesh import MeshStrategy
from lightning_swift.strategies._mesh_setup import move_parameters
from lightning_swift.strategies._tensor_pipeline_batch import (
    FactorCheck,
    draws_masks,
    refuse_different_batches,
    share_generators,
    share_randomness,
)
from lightning_swift.strategies._tensor_pipeline_model import (
    Pipeline,
    add_idle_parameter,
    check_trainer,
    copies_of_tied_weights,
    plan_pipeline,
    put_pipeline,
    saved_model,
    share_tied_weights,
    stages_of,
    without_idle,
)
from lightning_swift.strategies._tensor_pipeline_optimizers import naming_empty_stages, prepare_optimizers
from lightning_swift.strategies._tensor_pipeline_options import TensorPipelineOptions
from lightning_swift.strategies._tensor_pipeline_report import startup_table

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["TensorPipelineEngine"]

# Under this name the LightningModule remembers how its model is dealt out.
_PIPELINE = "_lightning_swift_pipeline"


class TensorPipelineEngine(MeshStrategy):
    """Adds the pipeline and tensor-parallel axes to the mesh engine.

    Args:
        options: What the preset asks for.

    Attributes:
        averages_in_forward: Tells modules that gradients are averaged over data-parallel ranks in the forward pass
            already: what multiplies the loss afterwards must be the same on all ranks.
    """

    options: TensorPipelineOptions
    averages_in_forward = True

    def __init__(self, options: TensorPipelineOptions) -> None:
        super().__init__(options)
        self._reports: list[TensorParallelReport] = []
        self._watch: FailureWatch | None = None
        self._compared: set[str] = set()
        self._seed = 0

    @override
    def setup_environment(self) -> None:
        check_trainer(self._trainer, self.mesh_sizes)
        super().setup_environment()
        self._watch = FailureWatch(self._label)
        # Of the first rank, since processes that are not seeded differ.
        self._seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) % 2**62)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._compared.clear()
        super().setup(trainer)
        pipelined = self._pipelined_model
        copies = copies_of_tied_weights(pipelined, self._dealt)
        self._precision.other_stages = OtherStages(self.device_mesh.get_group(MeshAxis.PP), self.root_device, copies)
        pipelined.on_backward = FactorCheck() if self.mesh_sizes.data_parallel > 1 else None
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(startup_table(self._dealt))

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with naming_empty_stages(self._label):
            super().setup_optimizers(trainer)
        prepare_optimizers(self.optimizers)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._shares_batches:
            share_randomness(dataloader, seed=self._seed, share=data_parallel_rank(self.device_mesh))
        return super().process_dataloader(dataloader)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._step("training", args):
            output = super().training_step(*args, **kwargs)
            _refuse_terms_of_parameters(output["loss"] if isinstance(output, Mapping) else output)
            return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._step("validation", args):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._step("test", args):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._step("prediction", args):
            return super().predict_step(*args, **kwargs)

    @override
    def reduce(
        self, tensor: Tensor | Any, group: dist.ProcessGroup | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        # Where self.log(..., sync_dist=True) meets such a loss, before the step has returned it.
        _refuse_terms_of_parameters(tensor)
        return super().reduce(tensor, group, reduce_op)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._watch is not None:
            self._watch.report(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        super().teardown()

    @override
    def _split_into_stages(self, module: pl.LightningModule) -> None:
        self._refuse_recomputed_kernels(module)
        pipeline = plan_pipeline(module, self.mesh_sizes, self.options)
        pipelined = put_pipeline(module, pipeline, self.device_mesh, self.options, device=self.root_device)
        share_tied_weights(pipelined, pipeline, self.device_mesh, self.root_device)
        setattr(module, _PIPELINE, pipeline)

    @override
    def _add_adapters(self, module: nn.Module) -> None:
        for stage in stages_of(self._pipelined_model):
            super()._add_adapters(stage)

    @override
    def _split_tensors(self, module: pl.LightningModule) -> None:
        if self.mesh_sizes.tp == 1:
            return
        tensor_mesh = self.device_mesh[MeshAxis.TP]
        self._reports = [
            apply_tensor_parallel(stage.model, tensor_mesh, self.options.tensor, first=stage.first, last=stage.last)
            for stage in stages_of(self._pipelined_model)
        ]

    @override
    def _shard(self, module: pl.LightningModule, blocks: list[tuple[str, nn.Module]]) -> None:
        if would_only_copy(self._pipelined_model, self.device_mesh, self.options.sharding):
            move_parameters(self._pipelined_model, self.root_device)
            return
        # Each stage is a root of its own: torch's schedules know when the last microbatch of one has run.
        shard(self._pipelined_model, self.device_mesh, self.options.sharding, blocks)

    @override
    def _finish(self, module: pl.LightningModule, blocks: int) -> None:
        pipelined = self._pipelined_model
        partial = set[nn.Parameter]()
        for stage, report in zip(stages_of(pipelined), self._reports, strict=False):
            partial |= partial_parameters(stage.model, report)
        if partial:
            group = self.device_mesh.get_group(MeshAxis.TP)
            pipelined.gradient_fixes.append(lambda pairs: sum_partial_gradients(pairs, partial, group))
        if self.mesh_sizes.tp > 1 and draws_masks(pipelined):
            share = share_generators(self.device_mesh.get_group(MeshAxis.TP), self.root_device)
            pipelined.register_forward_pre_hook(share)
        add_idle_parameter(pipelined, self.options.policy.master_dtype, self.root_device)
        super()._finish(module, blocks)

    @override
    def _saved_model(self) -> HuggingFaceModel | None:
        return saved_model(self._module, self._pipelined_model, self._dealt)

    @override
    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return without_idle(super()._optimizer_state(optimizer), self._dealt)

    @override
    def _load_request(self, optimizers: Sequence[Optimizer], stored: Index, manifest: Manifest) -> LoadRequest:
        request = super()._load_request(optimizers, stored, manifest)
        request.state = without_idle(request.state, self._dealt)
        return request

    @override
    def _load_file(self, path: Path, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        if self.mesh_sizes.pp > 1 and optimizers:
            raise ConfigurationError(
                "the file numbers the parameters of the optimizer, and a stage cannot know its own ones by number.",
                where=str(path),
                fix="Resume it once with FSDPBF16Strategy and save: that checkpoint resumes under any layout.",
            )
        return super()._load_file(path, optimizers)

    @override
    def _names_elsewhere(self) -> frozenset[str]:
        if self.mesh_sizes.pp == 1:
            return frozenset()
        names: list[Any] = [None] * self.world_size
        dist.all_gather_object(names, set(self._model_state()))
        return frozenset().union(*names)

    @property
    @override
    def _what_is_applied(self) -> tuple[object, ...]:
        return (*super()._what_is_applied, self.options.tensor, self.options.scheduled(self.mesh_sizes))

    @property
    def _dealt(self) -> Pipeline:
        pipeline: Pipeline = self._module.__dict__[_PIPELINE]
        return pipeline

    @property
    def _pipelined_model(self) -> PipelinedModel:
        found = self._module.get_submodule(self._dealt.path)
        assert isinstance(found, PipelinedModel)
        return found

    @property
    def _shares_batches(self) -> bool:
        return self.mesh_sizes.data_parallel < self.world_size

    @property
    def _label(self) -> str:
        place = self.device_mesh.get_local_rank(MeshAxis.PP)
        return f"rank {self.global_rank} (pipeline rank {place})"

    @contextmanager
    def _step(self, kind: str, arguments: tuple[Any, ...]) -> Generator[None]:
        """Report what a step raises, and compare the first batch of its kind."""
        assert self._watch is not None
        with self._watch:
            if self.options.check_batches and self._shares_batches and kind not in self._compared:
                self._compared.add(kind)
                refuse_different_batches(arguments[0], self.device_mesh, self.root_device)
            yield

    def _refuse_recomputed_kernels(self, module: nn.Module) -> None:
        settings = self.activation_checkpointing
        # "selective" tells torch operator by operator what to keep, which it can compile.
        checkpointed = (settings is not None and settings.mode != "selective") or any(
            getattr(part, "gradient_checkpointing", False) for part in module.modules()
        )
        if self.options.compile and checkpointed and self.mesh_sizes.tp > 1:
            raise ConfigurationError(
                f"compile={self.options.compile!r}, activation checkpointing and tensor_parallel_size="
                f"{self.mesh_sizes.tp} do not go together: torch cannot compile the recomputation of cut layers.",
                where="compile",
                fix='Use ActivationCheckpointing("selective"), or leave one of the three out.',
            )


def _refuse_terms_of_parameters(loss: object) -> None:
    # What a pipelined model returns leads to no parameter: its gradients are there already.
    if isinstance(loss, DTensor) or (isinstance(loss, Tensor) and _leads_to_parameters(loss)):
        raise ModelError(
            "the loss has a term that is computed from the parameters, of which each rank holds those of its stages.",
            where="training_step",
            fix="Return a loss that depends on the model through out.loss alone; optimizers have weight decay.",
        )


def _leads_to_parameters(loss: Tensor) -> bool:
    seen, left = set[object](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        seen.add(node)
        left += [inner for inner, _ in node.next_functions]
    return False
