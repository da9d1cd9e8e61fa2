"""Plain single-process training, with peft and bitsandbytes as their own users call them, and fits under ZeRO."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lightning_swift import lazy_pretrained
from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer

BATCH = 4
LR = 2e-3
SEED = 11


class Run(NamedTuple):
    """Losses of every micro-batch and of every validation, means over ranks."""

    losses: list[float]
    validation: list[float]


class Lazy(UserModule):
    """Built without weights where ``lazy``; logs every validation loss."""

    def __init__(self, folder: str, *, lazy: bool = True, checkpointing: bool | None = None) -> None:
        super().__init__(folder=folder, lr=LR)
        self.lazy, self.reentrant = lazy, checkpointing
        self.validation: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.lazy:
            self.model = lazy_pretrained(str(self.folder))
            self.model.train()
        else:
            super().configure_model()
        if self.reentrant is not None:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.reentrant})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, sync_dist=True)
        if not self.trainer.sanity_checking:
            self.validation.append(float(loss))


def settings(kind: str, **lora: Any) -> AdapterSettings:
    """``"full"``, ``"lora"``, ``"qlora"`` or ``"int8"``."""
    if kind == "full":
        return AdapterSettings()
    quantization: Any = {"lora": None, "qlora": "nf4", "int8": "int8"}[kind]
    return AdapterSettings(LoraSettings(r=4, alpha=8.0, **lora), quantization)


def plain_model(folder: str, kind: str, *, dtype: torch.dtype = torch.float32, **lora: Any) -> nn.Module:
    """What a user of transformers, peft and bitsandbytes trains without any strategy."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    extra: dict[str, Any] = {}
    if kind == "qlora":
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    if kind == "int8":
        extra["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra).train()
    for part in model.modules():
        # Without this, the first evaluation spoils training on CPUs with AVX512-BF16 (deepspeed.md section 3).
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    return model if kind == "full" else _with_adapters(model, folder, dtype, **lora)


def _with_adapters(model: Any, folder: str, dtype: torch.dtype, **lora: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = {f"use_{key}": value for key, value in lora.items()}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    # The first values of the strategies' adapters depend on the seed alone; take them over, by name.
    carrier = nn.Module()
    carrier.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seed_everything(SEED, verbose=False)
    apply_adapters(carrier, settings("lora", **lora), compute_dtype=torch.float32)
    initial = {name: p for name, p in carrier.model.named_parameters() if "lora_A" in name}
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data = initial.get(name, parameter).detach().to(dtype, copy=True)
    return wrapped.train()


def plain(model: nn.Module, *, steps: int, accumulate: int = 1, clip: float | None = None, every: int = 0) -> Run:
    """An ordinary loop over the batches that :func:`fit` deals to all ranks together; validates ``every`` steps."""
    world, x = dist.get_world_size(), Tokens().x
    size = world * BATCH
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.01)
    losses: list[float] = []
    validation: list[float] = []
    for step in range(steps):
        for k in range(accumulate):
            rows = [(size * (step * accumulate + k) + j) % len(x) for j in range(size)]
            loss = model(input_ids=x[rows], labels=x[rows], use_cache=False).loss
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if every and (step + 1) % every == 0:
            validation.append(validate(model))
    return Run(losses, validation)


@torch.no_grad()
def validate(model: nn.Module) -> float:
    """Loss over the batch of all ranks, in evaluation mode."""
    model.eval()
    rows = Tokens(n=BATCH * dist.get_world_size(), seed=9).x
    loss = float(model(input_ids=rows, labels=rows, use_cache=False).loss)
    model.train()
    return loss


def fit(
    module: Lazy,
    strategy: Any,
    *,
    steps: int,
    accumulate: int = 1,
    clip: float | None = None,
    every: int = 0,
    **kw: Any,
) -> Run:
    """Train ``module`` under ``strategy``; the sanity check runs too."""
    seed_everything(SEED, verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = quiet_trainer(
        strategy=strategy,
        max_steps=steps,
        max_epochs=1000,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        val_check_interval=every * accumulate or None,
        check_val_every_n_epoch=None if every else 1,
        num_sanity_val_steps=1,
        **kw,
    )
    loaders = [loader(Tokens(), batch_size=BATCH, rank=rank, world_size=world)]
    if every:
        held_out = Tokens(n=BATCH * world, seed=9)
        loaders.append(loader(held_out, batch_size=BATCH, rank=rank, world_size=world))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, *loaders)
    return Run(mean(module.losses), mean(module.validation))


def mean(values: list[float]) -> list[float]:
    """Over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor / dist.get_world_size()]


def difference(ours: Run, expected: Run) -> float:
    """Largest difference of any loss; infinite if there are more of one than of the other."""
    if (len(ours.losses), len(ours.validation)) != (len(expected.losses), len(expected.validation)):
        return float("inf")
    pairs = zip(ours.losses + ours.validation, expected.losses + expected.validation, strict=True)
    return max(abs(a - b) for a, b in pairs)
