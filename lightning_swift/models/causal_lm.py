"""A LightningModule that trains any causal language model of transformers, with an exact token-mean loss."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from transformers import PretrainedConfig
from typing_extensions import override

from lightning_swift.errors import ConfigurationError, DataError
from lightning_swift.models._chunked_loss import compute_loss_in_chunks
from lightning_swift.models._limits import check_limits
from lightning_swift.models._optimizer import OptimizerSettings, Schedule, build_optimizer, build_scheduler
from lightning_swift.models._sources import ModelSource, check_vocabulary, load_tokenizer
from lightning_swift.models._token_loss import TokenMean, count_targets, scale_gradients, with_a_target
from lightning_swift.models.lazy import Precision, load_lazy_weights
from lightning_swift.planner.settings import OptimizerName

__all__ = ["CausalLM"]

LossReduction = Literal["token", "mean"]
Loss = Literal["huggingface", "chunked"]


class CausalLM(L.LightningModule):
    """Trains a causal language model on batches of ``input_ids``, ``attention_mask`` and ``labels``.

    The model is built in ``configure_model``: under the strategies of this package without weights, which each rank
    then reads for its own shards; under any other strategy with all of them.

    With ``loss_reduction="token"`` loss and gradient of an optimizer step are those of the mean over all its target
    tokens, however these are split into ranks, microbatches and accumulation steps. Until the last backward pass of a
    step has ended, gradients are those of sums over tokens: hooks that look at them earlier (``on_after_backward``)
    see them unscaled; ``on_before_optimizer_step``, clipping and the optimizer see the mean. Under strategies of others
    that call their own engine instead of ``LightningModule.backward`` it is not exact. A subclass that overrides
    ``training_step``, ``backward`` or ``optimizer_step`` must call the method here.

    Logs ``train_loss`` once per optimizer step, and ``val_loss``, ``val_perplexity`` (``test_...``) over all tokens of
    a validation run.

    Args:
        path_or_config: Folder of a pretrained model (``config.json``, safetensors weights, tokenizer files); or, for
            random weights, the path of a configuration (``.json``), a folder without weights, or a configuration, also
            as dict with ``model_type``.
        lr: Peak learning rate.
        weight_decay: On matrices only; norm weights and biases have none.
        betas: Of AdamW.
        eps: Of AdamW.
        optimizer: ``"adamw"``: torch's, in the form that torch and the strategy choose. ``"adamw_fused"``: one kernel,
            no temporaries. ``"adamw_8bit"``: that of bitsandbytes, whose moments take 2 bytes a parameter instead of 8;
            for strategies that keep parameters whole (DDP, one device). ``"sgd"``: without momentum.
        warmup: Linear warm-up: a number of steps (int), or a share of all steps (float below 1).
        scheduler: What follows it: ``"constant"``, ``"linear"`` or ``"cosine"`` down to 0 at the last step, or
            ``"inverse_sqrt"``.
        loss: ``"huggingface"``: all logits of a microbatch at once, as the model does it. ``"chunked"``: those of
            ``loss_chunk`` tokens at a time, computed again in the backward pass; the same loss for less memory, which
            matters with long sequences and large vocabularies. Not under tensor or pipeline parallelism.
        loss_chunk: Tokens of a chunk.
        loss_reduction: ``"token"`` as above, or ``"mean"``: the mean over microbatches of their token means.
        dtype: Type of the parameters; the strategy chooses that of the computation.
        config_overrides: Options of the configuration to change, such as ``attn_implementation``.
        tokenizer: Folder of the tokenizer if it is not that of the model.
        freeze: Patterns (``*`` as in file names) of parameters not to train, such as ``"model.embed_tokens.*"``.
        max_new_tokens: How far ``predict_step`` continues a prompt.
        seed: Of random weights, which are the same on all ranks.

    Raises:
        ModelError: The folder cannot be used, or the tokenizer has more tokens than the model has embeddings.
        ConfigurationError: A value that is not allowed, a pattern of ``freeze`` that matches nothing, or an option
            that the strategy cannot have.
    """

    def __init__(
        self,
        path_or_config: str | Path | dict[str, Any] | PretrainedConfig,
        *,
        lr: float = 2e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        warmup: int | float = 0,
        optimizer: OptimizerName = "adamw",
        scheduler: Schedule = "constant",
        loss: Loss = "huggingface",
        loss_chunk: int = 1024,
        loss_reduction: LossReduction = "token",
        dtype: Precision = "float32",
        config_overrides: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        freeze: list[str] | None = None,
        max_new_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_choice("loss_reduction", loss_reduction, get_args(LossReduction))
        _check_choice("loss", loss, get_args(Loss))
        if isinstance(loss_chunk, bool) or loss_chunk < 1:
            raise ConfigurationError(f"loss_chunk={loss_chunk!r} is not a number of tokens.", where="CausalLM")
        self._source = ModelSource.of(path_or_config, dtype=dtype, overrides=config_overrides or {}, seed=seed)
        self._optimizer_settings = OptimizerSettings(lr, weight_decay, betas, eps, warmup, scheduler, optimizer)
        self._chunk = loss_chunk if loss == "chunked" else 0
        self._freeze, self._exact, self._max_new_tokens = freeze or [], loss_reduction == "token", max_new_tokens
        self.save_hyperparameters(ignore=["path_or_config"])
        self.save_hyperparameters({"path_or_config": self._source.plain})
        self._tokenizer = load_tokenizer(tokenizer or self._source.folder, required=tokenizer is not None)
        check_vocabulary(self._tokenizer, self._source.config)
        self.model: Any = None
        self._step = TokenMean()
        self._targets: Tensor | None = None
        self._evaluation: list[TokenMean] = []
        self._warned = False

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder (or of ``tokenizer``); None if there is none."""
        return self._tokenizer

    @property
    def config(self) -> Any:
        """The configuration of the model, known before it is built; data is checked against it."""
        return self._source.config

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        trainer = getattr(self, "_trainer", None)
        check_limits(trainer, chunked=bool(self._chunk), optimizer=self._optimizer_settings.name)
        self.model = self._source.build()
        if self._chunk:
            compute_loss_in_chunks(self.model, self._chunk)
        _freeze(self.model, self._freeze)
        if self._source.pretrained and not getattr(getattr(trainer, "strategy", None), "loads_lazy_weights", False):
            load_lazy_weights(self.model, device="cpu" if trainer is None else trainer.strategy.root_device)
        # Built models are in evaluation mode, and Lightning keeps the mode it finds.
        self.model.train()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.parameters(), self._optimizer_settings)
        schedule = build_scheduler(optimizer, self._optimizer_settings, lambda: self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @override
    def on_train_start(self) -> None:
        self._step = TokenMean()

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss, self._targets = self._token_mean(batch)
        if self._exact:
            self._step.add(loss, self._targets)
        else:
            self.log("train_loss", loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    def loss_for_backward(self, loss: Tensor) -> Tensor:
        """What the backward pass of a microbatch starts from; for strategies whose engine has its own ``backward``.

        Args:
            loss: What ``training_step`` returned, divided by the accumulation steps.

        Returns:
            The sum over this microbatch's target tokens where the loss is exact, and ``loss`` otherwise.
        """
        if self._exact and self._targets is not None:
            # Without targets here, the gradient may still hold what the other ranks have put into the average.
            weight = self._targets.clamp(min=1) if self._averaged_in_forward else self._targets
            return loss * (weight * self.trainer.accumulate_grad_batches)
        return loss

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(self.loss_for_backward(loss), *args, **kwargs)

    @override
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        def closure() -> Any:
            result = optimizer_closure() if optimizer_closure is not None else None
            self._divide_by_tokens()
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure if self._exact else optimizer_closure)

    def _divide_by_tokens(self) -> None:
        """Turn gradients of sums, averaged over ranks by the strategy, into that of the mean over all tokens."""
        totals = self._step.totals(self._reduce_sum, self.device)
        factor = totals.ranks / max(totals.tokens, 1)
        # An engine that keeps gradients to itself scales them where it keeps them.
        scale = getattr(self.trainer.strategy, "scale_gradients", None)
        scale_gradients(self.parameters(), factor) if scale is None else scale(factor)
        if not totals.tokens and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Optimizer step {self.trainer.global_step}: no rank had a token to predict, so its gradient is 0. "
                "Look at the labels: are all of them masked?"
            )
        self.log("train_loss", totals.mean, prog_bar=True, batch_size=1)

    @override
    def on_validation_epoch_start(self) -> None:
        self._evaluation = [TokenMean() for _ in self.trainer.num_val_batches]

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluation[dataloader_idx].add(*self._token_mean(batch))

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    @override
    def on_test_epoch_start(self) -> None:
        self._evaluation = [TokenMean() for _ in self.trainer.num_test_batches]

    @override
    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluation[dataloader_idx].add(*self._token_mean(batch))

    @override
    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    @override
    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Continue each prompt of ``input_ids``; returns ids of shape ``[batch, length + new]``, padded on the left."""
        ids, mask = _padded_left(batch["input_ids"], batch.get("attention_mask"))
        # Sharded ranks gather parameters together, so all go on until the last one has ended.
        generated: Tensor = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self._max_new_tokens,
            synced_gpus=self.trainer.world_size > 1,
        )
        return generated

    def _token_mean(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss of the batch's target tokens and their number, both scalars; 0 and 0 without targets."""
        if "labels" not in batch:
            raise DataError(
                f"the batch has {', '.join(sorted(batch))} but no labels.",
                where=type(self).__name__,
                fix="Let the data set return labels: a copy of input_ids with -100 where no loss is wanted.",
            )
        tokens = count_targets(batch["labels"])
        if self._averaged_in_forward or self._chunk:
            # Averaged before `backward` could weigh them by the tokens of each rank, or chunk by chunk: a sum.
            total: Tensor = self.model(**batch, num_items_in_batch=torch.ones_like(tokens), use_cache=False).loss
            return total / tokens.clamp(min=1), tokens
        labels = with_a_target(batch["labels"], batch["input_ids"], tokens)
        loss: Tensor = self.model(**{**batch, "labels": labels}, use_cache=False).loss
        return loss * (tokens > 0), tokens

    @property
    def _averaged_in_forward(self) -> bool:
        """Whether gradients are averaged over ranks in the forward pass already, as in a pipeline."""
        return self._exact and bool(getattr(self.trainer.strategy, "averages_in_forward", False))

    def _reduce_sum(self, values: Tensor) -> Tensor:
        total: Tensor = self.trainer.strategy.reduce(values, reduce_op="sum")
        return total

    def _log_evaluation(self, name: str) -> None:
        for i, mean in enumerate(self._evaluation):
            suffix = f"_{i}" if len(self._evaluation) > 1 else ""
            loss = mean.totals(self._reduce_sum, self.device).mean
            # Equal on all ranks already; Lightning warns of every value that is not synchronised.
            self.log(f"{name}_loss{suffix}", loss, prog_bar=True, sync_dist=True)
            self.log(f"{name}_perplexity{suffix}", math.exp(min(loss, _MAX_EXPONENT)), sync_dist=True)


# exp(700) is near the largest FP64 number.
_MAX_EXPONENT = 700.0


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(
            f"{name}={value!r} is not allowed.", where="CausalLM", fix=f"Use one of {', '.join(allowed)}."
        )


def _freeze(model: Any, patterns: list[str]) -> None:
    for pattern in patterns:
        matching = [p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigurationError(
                f"no parameter is called {pattern!r}.",
                where="freeze",
                fix=f"Names look like {next(iter(dict(model.named_parameters())))!r}; '*' stands for anything.",
            )
        for parameter in matching:
            parameter.requires_grad_(False)


def _padded_left(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same prompts with their padding in front, where a model that continues them needs it."""
    if mask is None:
        return ids, torch.ones_like(ids)
    # A stable sort by the mask moves padding to the front and keeps the order of all else.
    order = mask.sort(dim=1, stable=True).indices
    return ids.gather(1, order), mask.gather(1, order)
