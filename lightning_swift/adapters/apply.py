"""Puts LoRA adapters, and quantised layers under them, into the Hugging Face model of any module."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_swift.adapters.dora import keep_weights_in_place, not_copied
from lightning_swift.adapters.initial import initialise_adapters
from lightning_swift.adapters.quantise import (
    element_count,
    guard_packing,
    is_quantised,
    quantisation_of,
    quantise_layers,
    quantised_layers,
)
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings
from lightning_swift.errors import ConfigurationError, ModelError

__all__ = ["AdapterReport", "apply_adapters", "has_adapters"]

# Under this name a module remembers what was put into it.
_APPLIED = "_lightning_swift_adapters"
# Tasks that peft knows, by the end of the model's class name; it also trains the new head of the classifiers.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


@dataclass(frozen=True)
class AdapterReport:
    """What was done to a module.

    Args:
        model: Name of the attribute that holds the Hugging Face model (now its peft wrapper); "" if none was touched.
        injected: Whether adapters were put in (not if the user's own were found).
        adapted: Names of the layers with adapters, relative to the Hugging Face model.
        quantised: Names of the layers stored in 4 or 8 bits, relative to the Hugging Face model.
        trainable: Number of trainable elements of the module.
        total: Number of elements of the module, before packing.
    """

    model: str = ""
    injected: bool = False
    adapted: tuple[str, ...] = ()
    quantised: tuple[str, ...] = ()
    trainable: int = 0
    total: int = 0

    def __str__(self) -> str:
        packed = f", {len(self.quantised)} of them quantised" if self.quantised else ""
        share = 100 * self.trainable / max(self.total, 1)
        return (
            f"{len(self.adapted)} layers of {self.model} have adapters{packed}; "
            f"{self.trainable:,} of {self.total:,} parameters ({share:.2f} %) train"
        )


def apply_adapters(
    module: nn.Module,
    settings: AdapterSettings,
    *,
    compute_dtype: torch.dtype,
    storage_dtype: torch.dtype = torch.uint8,
) -> AdapterReport:
    """Put what ``settings`` ask for into the one Hugging Face model below ``module``, in place.

    Frozen parameters are kept in ``compute_dtype``, adapters in float32. Linear layers but the head are quantised:
    at once and one by one in a model with weights; while ``load_lazy_weights`` reads them in a lazy one. Also guards
    quantised layers that the user's own code has made, so every strategy calls it for every module, even without
    ``lora``. A second call with the same settings does nothing.

    Args:
        module: A LightningModule, or anything that holds a Hugging Face model.
        settings: Adapters and quantisation.
        compute_dtype: What the engine computes in: bfloat16, or float32.
        storage_dtype: What packed 4-bit weights pretend to be. uint8 survives every cast; any other value must be
            the engine's own dtype, since a cast rewrites the bytes.

    Returns:
        What was done.

    Raises:
        ModelError: There is no Hugging Face model or several; the model holds adapters or quantised layers already
            and the settings ask for others; no layer is called as ``target_modules`` says.
        ConfigurationError: A package is missing, or ``storage_dtype`` would not survive.
    """
    _check_storage(storage_dtype, compute_dtype)
    applied: tuple[AdapterSettings, AdapterReport] | None = module.__dict__.get(_APPLIED)
    if applied is not None and (settings.lora is None or applied[0] == settings):
        return applied[1]
    guard_packing(module)
    _check_user_storage(module, compute_dtype)
    if settings.lora is None:
        return _report(module, "", None)
    if has_adapters(module):
        raise ModelError(
            "the model holds adapters already, and lora= asks for more.",
            where=type(module).__name__,
            fix="Leave lora= out to train those of the model, or do not call get_peft_model in configure_model.",
        )
    path, places = _find_model(module)
    model = places[0][2]
    _cast(model, compute_dtype)
    _quantise(model, settings, compute_dtype, storage_dtype)
    wrapped = _inject(model, settings.lora)
    for owner, name, _ in places:
        setattr(owner, name, wrapped)
    guard_packing(module)
    report = _report(module, path, model)
    setattr(module, _APPLIED, (settings, report))
    return report


def has_adapters(module: nn.Module) -> bool:
    """Whether peft has put adapters into a model below ``module``."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, BaseTunerLayer) for part in module.modules())


def _check_storage(storage: torch.dtype, compute: torch.dtype) -> None:
    if storage not in (torch.uint8, compute):
        raise ConfigurationError(
            f"4-bit weights stored as {storage} are rewritten by an engine that casts to {compute}.",
            where="storage_dtype",
            fix=f"Use torch.uint8 or {compute}.",
        )


def _check_user_storage(module: nn.Module, compute: torch.dtype) -> None:
    for name, layer in quantised_layers(module).items():
        storage = getattr(layer, "quant_storage", torch.uint8)
        if storage.is_floating_point and storage != compute:
            raise ModelError(
                f"the 4-bit weight is stored as {storage}, and a cast to {compute} would rewrite it.",
                where=name,
                fix="Set bnb_4bit_quant_storage to torch.uint8 (its default) in the BitsAndBytesConfig.",
            )


def _find_model(module: nn.Module) -> tuple[str, list[tuple[nn.Module, str, Any]]]:
    """Name of the one Hugging Face model below ``module``, and every place that holds it."""
    from transformers import PreTrainedModel

    places = [
        (f"{prefix}.{name}".strip("."), owner, name, child)
        for prefix, owner in module.named_modules()
        if not isinstance(owner, PreTrainedModel)
        # named_children would name one module once.
        for name, child in owner._modules.items()
        if isinstance(child, PreTrainedModel)
    ]
    inside = {id(part) for *_, child in places for part in child.modules() if part is not child}
    places = [place for place in places if id(place[3]) not in inside]
    models = {id(child): path for path, *_, child in places}
    if len(models) != 1:
        held = f"holds {len(models)} Hugging Face models ({', '.join(models.values())})" if models else "holds none"
        raise ModelError(
            f"lora= puts adapters into the Hugging Face model of a module, and this one {held}.",
            where=type(module).__name__,
            fix="Leave lora= out and call peft's get_peft_model in configure_model.",
        )
    return places[0][0], [place[1:] for place in places]


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring what will be frozen to the dtype of the computation, one parameter at a time."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_quantised(parameter) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _quantise(model: nn.Module, settings: AdapterSettings, compute: torch.dtype, storage: torch.dtype) -> None:
    found = quantisation_of(model)
    if settings.quantization is not None and found is None:
        quantise_layers(model, settings, compute_dtype=compute, storage_dtype=storage)
    elif settings.quantization is not None and found != settings.quantization:
        raise ModelError(
            f"the model was loaded quantised as {found}, and quantization={settings.quantization!r} asks for another.",
            where="quantization",
            fix="Leave quantization out, or load the model without a quantization_config.",
        )


def _inject(model: Any, lora: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if lora.dora:
        keep_weights_in_place(model)
    config = LoraConfig(
        r=lora.r,
        # peft's files hold a whole number where they can, and some readers want one.
        lora_alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in model.modules()),
        task_type=next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None),
    )
    try:
        with not_copied(model):
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, re.error) as error:
        raise ModelError(
            f"peft cannot adapt {type(model).__name__} ({error}).",
            where=f"lora.target_modules={lora.target_modules!r}",
            fix='Use "all-linear", or names of linear layers of this model.',
        ) from error
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    initialise_adapters(model)
    return wrapped


def _report(module: nn.Module, path: str, model: nn.Module | None) -> AdapterReport:
    counts = [(element_count(p), p.requires_grad) for p in module.parameters()]
    adapted = () if model is None else tuple(n for n, p in model.named_modules() if hasattr(p, "lora_A"))
    quantised = () if model is None else tuple(quantised_layers(model))
    return AdapterReport(
        model=path,
        injected=model is not None,
        adapted=adapted,
        quantised=tuple(name.removesuffix(".base_layer") for name in quantised),
        trainable=sum(count for count, trains in counts if trains),
        total=sum(count for count, _ in counts),
    )
