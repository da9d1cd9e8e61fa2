"""Linear layers stored in 4 or 8 bits by bitsandbytes, and what keeps them from being spoilt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swift.adapters.settings import AdapterSettings, Quantization
from lightning_swift.errors import ConfigurationError, ModelError

__all__ = [
    "dequantised_weight",
    "element_count",
    "guard_packing",
    "is_quantised",
    "quantisation_of",
    "quantise_layers",
    "quantised_layers",
    "quantised_weight",
    "without_second_copies",
]

# What transformers uses for 8-bit models: input columns with larger values are multiplied unquantised in inference.
_OUTLIER = 6.0
_PACKED = "packing_format_for_cpu"
# Weights that share one scale. Any number of rows that is a multiple of it is a whole number of blocks.
_BLOCK = 64
# On the CPU, bitsandbytes needs seven times the BF16 size of what it quantises at once: not more than this.
_PIECE = 1 << 18


def quantise_layers(
    model: nn.Module, settings: AdapterSettings, *, compute_dtype: torch.dtype, storage_dtype: torch.dtype
) -> tuple[str, ...]:
    """Replace the linear layers of a Hugging Face model by quantised ones, one by one; return their names.

    The head, tied layers and what the architecture keeps in float32 stay. A layer on the meta device becomes an empty
    quantised one, which ``load_lazy_weights`` fills.

    Args:
        model: A ``PreTrainedModel``.
        settings: With ``quantization`` set.
        compute_dtype: What the layers compute in; weights are rounded to it first, as by
            ``from_pretrained(dtype=..., quantization_config=...)``.
        storage_dtype: Dtype of the packed 4-bit weights.

    Raises:
        ConfigurationError: bitsandbytes is not installed.
        ModelError: There is no such layer, or one of a kind that is not supported.
    """
    _require_bitsandbytes(settings.quantization)
    # Names alone: a list of layers would keep each whole weight until the last one is packed.
    chosen = tuple(_quantisable(model))
    if not chosen:
        raise ModelError(
            f"{type(model).__name__} has no linear layer to quantise.",
            where=f"quantization={settings.quantization!r}",
            fix="Leave quantization out for this model.",
        )
    for name in chosen:
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, _quantised_layer(layer, settings, compute_dtype, storage_dtype))
        del layer
    # What transformers sets; peft chooses the classes of its adapters by it.
    setattr(model, "is_loaded_in_4bit" if settings.quantization == "nf4" else "is_loaded_in_8bit", True)
    return chosen


def guard_packing(module: nn.Module) -> int:
    """Keep every 4-bit layer below ``module`` from rewriting its weight; return how many there are.

    On CPUs with AVX512-BF16, bitsandbytes packs the weight anew, in place, in the first forward pass of an
    evaluation, and training after that is silently wrong. To be called for every model that may hold such layers,
    before its first forward pass, whoever made them. Imports nothing.

    Raises:
        ModelError: A layer has been rewritten already; its scales have been rounded, so this cannot be undone.
    """
    found = 0
    for name, layer in quantised_layers(module).items():
        state = getattr(layer.weight, "quant_state", None)
        if getattr(state, _PACKED, False):
            raise ModelError(
                "the 4-bit weight has been repacked for inference by an evaluation and cannot be trained on any more.",
                where=name,
                fix="Build the model anew and evaluate it through the Trainer only.",
            )
        if _kind(layer) == "4bit":
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            found += 1
    return found


def without_second_copies(module: nn.Module) -> None:
    """Have every 8-bit layer below ``module`` compute with its weight alone, so that an engine may cut it up.

    Each keeps a second reference to its codes, computes with those, and puts them back into the weight after every
    forward pass: a weight of which a rank holds a part would stay whole beside it. Calling it again changes nothing.
    """
    for layer in quantised_layers(module).values():
        if _kind(layer) != "8bit" or isinstance(layer.state, _state_of_weight()):
            continue
        if layer.weight.CB is not None:  # type: ignore[union-attr]
            layer.init_8bit_state()  # type: ignore[operator]
        state = _state_of_weight()()
        vars(state).update({key: value for key, value in vars(layer.state).items() if key != "CB"}, layer=layer)
        layer.state = state


def quantised_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Every 4-bit and 8-bit layer of bitsandbytes below ``module``, by name."""
    if "bitsandbytes" not in sys.modules:
        return {}
    return {name: layer for name, layer in module.named_modules() if _kind(layer) is not None}


def quantisation_of(module: nn.Module) -> str | None:
    """How the quantised layers below ``module`` are stored, ``"nf4"``, ``"fp4"`` or ``"int8"``; None if none is.

    Raises:
        ModelError: There are several kinds.
    """
    kinds = {
        str(layer.weight.quant_type) if _kind(layer) == "4bit" else "int8"  # type: ignore[union-attr]
        for layer in quantised_layers(module).values()
    }
    if len(kinds) > 1:
        raise ModelError(f"the model has layers of several kinds: {', '.join(sorted(kinds))}.", where="quantization")
    return next(iter(kinds), None)


def is_quantised(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a weight in the form of bitsandbytes (packed, of another shape than the matrix)."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params") and not getattr(
        parameter, "has_fp16_weights", False
    )


def element_count(parameter: Tensor) -> int:
    """Number of elements of the matrix that ``parameter`` holds: not changed by packing, nor by ZeRO-3's partitions."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return int(state.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def quantised_weight(empty: Any, whole: Tensor) -> nn.Parameter:
    """The parameter that stores ``whole``, in the way that the ``empty`` one of a quantised layer describes.

    Args:
        empty: ``weight`` of a layer of :func:`quantise_layers`, on the meta device.
        whole: The matrix ``[out, in]``, in any floating-point dtype, where the parameter is to live.
    """
    from bitsandbytes.nn.modules import Int8Params, Params4bit

    source = whole.detach()
    if isinstance(empty, Int8Params):
        codes, scales = _int8(source, empty.dtype)
        return Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
    packed, state = _nf4(source, empty)
    values = {key: value for key, value in vars(empty).items() if key not in ("data", "quant_state", "bnb_quantized")}
    if empty.module is not None:
        empty.module.quant_state = state
    return Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True, **values)


def dequantised_weight(layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix ``[out, in]`` that a 4-bit or 8-bit layer computes with; changes nothing in the layer.

    The weight is looked up once, so that an engine that gathers parameters on access (ZeRO-3) gathers this one.
    """
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    weight = layer.weight
    if weight.is_meta:
        return torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
    if type(weight).__name__ == "Params4bit":
        matrix: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    else:
        scales = weight.SCB if weight.SCB is not None else layer.state.SCB
        matrix = int8_vectorwise_dequant(weight.data, scales.to(weight.device))
    return matrix.to(dtype)


def _require_bitsandbytes(kind: Quantization | None) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"quantization={kind!r} needs bitsandbytes, which cannot be imported ({error}).",
            where="quantization",
            fix="Install it with `pip install bitsandbytes`.",
        ) from error


def _kind(layer: nn.Module) -> str | None:
    bases = {kind.__name__ for kind in type(layer).__mro__ if kind.__module__.startswith("bitsandbytes")}
    if "Linear4bit" in bases:
        return "4bit"
    return "8bit" if "Linear8bitLt" in bases else None


def _quantisable(model: Any) -> Iterator[str]:
    from transformers.pytorch_utils import Conv1D

    owners: dict[int, int] = {}
    for part in model.modules():
        for parameter in part._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    exact = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Conv1D):
            raise ModelError(
                "the layer is a transposed one (Conv1D), whose quantised form could not be merged or exported.",
                where=name,
                fix=f"Leave quantization out for {type(model).__name__}.",
            )
        head = layer is model.get_output_embeddings() or "." not in name
        if type(layer) is nn.Linear and not head and owners[id(layer.weight)] == 1 and not _names(name, exact):
            yield name


def _names(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.split(".") for part in parts)


def _quantised_layer(
    layer: nn.Linear, settings: AdapterSettings, compute_dtype: torch.dtype, storage_dtype: torch.dtype
) -> nn.Module:
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    new: Any
    with torch.device("meta"):
        if settings.quantization == "int8":
            new = Linear8bitLt(*sizes, has_fp16_weights=False, threshold=_OUTLIER)
        else:
            new = Linear4bit(
                *sizes,
                compute_dtype=compute_dtype,
                compress_statistics=settings.double_quant,
                quant_type="nf4",
                quant_storage=storage_dtype,
            )
    new.weight.data = new.weight.data.to(compute_dtype)
    new.train(layer.training)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(compute_dtype), requires_grad=False)
    if not layer.weight.is_meta:
        new.weight = quantised_weight(new.weight, layer.weight)
    return new  # type: ignore[no-any-return]


@cache
def _state_of_weight() -> Any:
    """Class of an 8-bit layer's state whose codes are those of the layer's weight, there when it has been gathered."""
    from bitsandbytes import MatmulLtState  # type: ignore[attr-defined]  # not said to be public

    class StateOfWeight(MatmulLtState):
        # An attribute, so that the copy of a layer has one that looks at the copy.
        layer: Any = None

        @property
        def CB(self) -> Tensor:  # the name by which bitsandbytes asks
            codes: Tensor = self.layer.weight.data
            return codes

        @CB.setter
        def CB(self, _: object) -> None:
            """Nothing: the weight has them."""

    return StateOfWeight


def _pieces(matrix: Tensor) -> tuple[Tensor, ...]:
    """Whole rows of ``matrix`` that make a whole number of blocks; all of it where kernels need no copies."""
    rows = matrix.shape[0] if matrix.device.type != "cpu" else max(_PIECE // matrix.shape[1] // _BLOCK, 1) * _BLOCK
    return torch.split(matrix, rows)


def _int8(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales, which are per row."""
    from bitsandbytes.functional import int8_vectorwise_quant

    done = [int8_vectorwise_quant(rows.to(dtype).to(torch.float16).contiguous()) for rows in _pieces(matrix)]
    return torch.cat([codes for codes, *_ in done]), torch.cat([scales for _, scales, _ in done])


def _nf4(matrix: Tensor, settings: Any) -> tuple[Tensor, Any]:
    """What ``bitsandbytes.functional.quantize_4bit`` gives, bit for bit, at a fraction of its memory."""
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    done = [
        quantize_4bit(
            rows.to(settings.dtype).contiguous(),
            blocksize=settings.blocksize,
            quant_type=settings.quant_type,
            quant_storage=settings.quant_storage,
        )
        for rows in _pieces(matrix)
    ]
    absmax = torch.cat([state.absmax for _, state in done])
    nested: dict[str, Any] = {}
    if settings.compress_statistics:
        offset = absmax.mean()
        absmax, state2 = quantize_blockwise(absmax - offset, blocksize=256)
        nested = {"offset": offset, "state2": state2}
    state = QuantState(
        absmax=absmax,
        shape=matrix.shape,
        dtype=settings.dtype,
        blocksize=settings.blocksize,
        code=done[0][1].code,
        quant_type=settings.quant_type,
        **nested,
    )
    return torch.cat([packed for packed, _ in done]), state
