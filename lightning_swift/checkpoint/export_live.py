"""The trained model in memory, sharded or whole, as the reference that an export is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_swift.checkpoint.export_logits import logits_of, token_ids
from lightning_swift.checkpoint.export_verify import ROUNDING, Expected, quantised_tolerance

__all__ = ["expect_live"]


def expect_live(
    root: nn.Module, path: str, *, dtype: str | None, merged: bool, quantization: Mapping[str, Any] | None = None
) -> Expected:
    """What the Hugging Face model at ``path`` below ``root`` answers now. A collective call if it is sharded.

    The folder is to be loaded in the dtype the model computes in here. If it is exported in a narrower one, the
    weights in memory are rounded to that for the duration of the call, so that the logits can still have equal bits.

    Args:
        root: The LightningModule.
        path: Of the ``PreTrainedModel``, or of the ``PeftModel`` around it.
        dtype: Of the export; None if the weights are exported as they are.
        merged: Whether adapters are merged into the weights; logits then agree up to rounding only.
        quantization: How the model is quantised, as in the manifest of a checkpoint; logits then agree up to what its
            kernels round.
    """
    model: Any = root.get_submodule(path)
    device = next(model.parameters()).device
    ids = token_ids(model.config)
    target = None if dtype is None or merged else getattr(torch, dtype)
    # Rounded before gathered: what is gathered is a copy, and asking for the state dict would put it back.
    pipelined = _pipelined(model)
    with _rounded(model, target), _gathered_around(root, path), _watched_dtype(model, pipelined) as seen:
        logits = logits_of(model, ids, device=device)
    compute = str(seen[0]).removeprefix("torch.")
    # Cut layers sum in another order, and so do microbatches.
    as_loaded = quantization is None and pipelined is None
    exact = device.type == "cpu" and not merged and not _is_compiled(model) and as_loaded
    rounding = max(ROUNDING[compute], ROUNDING[dtype or compute])
    if quantization is not None:
        rounding = max(rounding, quantised_tolerance(quantization, compute))
    return Expected(
        ids=ids,
        logits=logits,
        dtype=compute,
        tolerance=0.0 if exact else rounding,
        quantization=None if quantization is None else dict(quantization),
        attention=getattr(model.config, "_attn_implementation", None),
        device=_where_to_reload(model, device),
    )


@contextmanager
def _gathered_around(root: nn.Module, path: str) -> Iterator[None]:
    """Gather the parameters that an FSDP group around the model holds; the model's own groups gather themselves."""
    with ExitStack() as stack:
        parts = path.split(".")
        for end in range(len(parts)):
            module = root.get_submodule(".".join(parts[:end]))
            if isinstance(module, FSDPModule):
                module.unshard()
                stack.callback(module.reshard)
        yield


def _pipelined(model: nn.Module) -> Any:
    """What runs in the model's place if it is dealt out to the stages of a pipeline."""
    return next((part for part in model.modules() if hasattr(part, "gather_logits")), None)


@contextmanager
def _watched_dtype(model: Any, pipelined: Any) -> Iterator[list[torch.dtype]]:
    if pipelined is not None:
        before, pipelined.gather_logits = pipelined.gather_logits, True
        try:
            yield [pipelined.activation_dtype]
        finally:
            pipelined.gather_logits = before
        return
    # The parameters as they lie may have another dtype than those that FSDP's mixed precision computes with.
    seen: list[torch.dtype] = []

    def look(module: nn.Module, _: object) -> None:
        seen.append(module.weight.dtype)  # type: ignore[arg-type]

    handle = model.get_input_embeddings().register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _rounded(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Round every wider floating-point weight to ``dtype`` in place; put the values back from host memory after."""
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for local in _locals(model) if dtype is not None else ():
                if local.is_floating_point() and dtype is not None and local.dtype.itemsize > dtype.itemsize:
                    kept.append((local, local.to("cpu", copy=True)))
                    local.copy_(local.to(dtype))
        yield
    finally:
        with torch.no_grad():
            for local, old in kept:
                local.copy_(old)


def _locals(model: nn.Module) -> list[Tensor]:
    """This rank's part of every tensor of the state dict, tied ones once."""
    own: dict[int, Tensor] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and id(tensor) not in own:
            plain = tensor.detach()
            own[id(tensor)] = plain.to_local() if isinstance(plain, DTensor) else plain
            # ZeRO-3 gathers from a part that lies beside the parameter.
            part = getattr(tensor, "ds_tensor", None)
            if part is not None:
                own[id(part)] = part.detach()
    return list(own.values())


def _is_compiled(model: nn.Module) -> bool:
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def _where_to_reload(model: nn.Module, device: torch.device) -> str:
    """The same device if the whole model fits there next to what training still holds, else the CPU."""
    if device.type != "cuda":
        return "cpu"
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    # Half again for activations, logits and the context of the second process.
    return str(device) if free > 1.5 * size + 2**30 else "cpu"
