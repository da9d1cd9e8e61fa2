"""What the tests of adapters share: a holder of one model, and the same models as transformers and peft make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.initial import initialise_adapters
from lightning_swift.adapters.quantise import guard_packing
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings
from lightning_swift.models.lazy import lazy_pretrained, load_lazy_weights
from tests.harness.models import Tokens

LORA = LoraSettings(r=4)
X = torch.arange(3, 35)[None]


class Holder(nn.Module):
    """Stands for a LightningModule."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def pretrained(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def by_transformers(folder: Path, kind: str, *, dtype: torch.dtype, double: bool = True, **options: Any) -> Any:
    """The quantised model that transformers and bitsandbytes load."""
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=double,
            bnb_4bit_compute_dtype=dtype,
            **options,
        )
    return pretrained(folder, dtype=dtype, quantization_config=config)


def by_us(
    folder: Path,
    kind: Any,
    *,
    dtype: torch.dtype = torch.float32,
    lazy: bool = True,
    lora: LoraSettings = LORA,
    double: bool = True,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """The peft model that ``apply_adapters`` makes."""
    holder = Holder(lazy_pretrained(folder) if lazy else pretrained(folder))
    holder.model.train()
    if prepare is not None:
        prepare(holder.model)
    apply_adapters(holder, AdapterSettings(lora, kind, double), compute_dtype=dtype, **options)
    load_lazy_weights(holder, device="cpu")
    return holder.model


def by_peft(model: Any, **options: Any) -> Any:
    """The peft model that a user makes, in training mode, guarded and with the first values that strategies draw."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_alpha=32, **{"r": 4, **options}))
    initialise_adapters(model)
    guard_packing(model)
    return wrapped.train()


def train(model: Any, *, steps: int = 20, evaluate: tuple[int, ...] = ()) -> list[float]:
    """Losses of a plain loop; before the steps of ``evaluate`` the model is evaluated once."""
    x = Tokens(64).x
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        if step in evaluate:
            losses.append(evaluated(model, x[-8:]))
        batch = x[4 * step % 56 :][:4]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def evaluated(model: Any, batch: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(input_ids=batch, labels=batch, use_cache=False).loss)
    model.train()
    return loss
