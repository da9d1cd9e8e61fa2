"""What tensor parallelism cannot do, refused before any communication, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_swift.adapters.tensor_parallel import check_lora
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.anatomy import Anatomy
from lightning_swift.parallel.experts import check_experts
from lightning_swift.parallel.plans import Cut, Planned, base_layer, check_user_plan, read_plan

__all__ = ["check_model"]

_LINEAR = (Cut.COLUMNS, Cut.ROWS)


def check_model(model: Any, size: int, user: Mapping[str, str] | None, anatomy: Anatomy, *, needs_head: bool) -> None:
    """Refuse a model, a plan or a number of ranks that do not go together. See ``check_tensor_parallel``."""
    check_user_plan(model, user or {})
    plan = read_plan(model, user)
    inside = [entry for entry in plan if entry.name.startswith(f"{anatomy.layers}.")]
    if not any(entry.meaning.cut in (*_LINEAR, Cut.EXPERTS) for entry in inside):
        raise _no_plan(model, anatomy)
    head = model.get_output_embeddings()
    if needs_head and not any(model.get_submodule(e.name) is head for e in plan if _is_module(model, e.name)):
        raise ModelError(
            "sequence and loss parallelism need a plan that cuts the output head.",
            where=type(model).__name__,
            fix="Name the head in tp_plan as 'colwise_gather_output', or turn both off.",
        )
    for entry in plan:
        _check_entry(model, entry, size, anatomy)
    _check_heads(model, inside, size)


def _no_plan(model: Any, anatomy: Anatomy) -> ModelError:
    return ModelError(
        "the architecture publishes no tensor-parallel plan, so nothing says how its layers are cut.",
        where=type(model).__name__,
        fix="Use tensor_parallel_size=1 with pipeline_parallel_size or data_parallel_shard instead, or name pairs of "
        f"linear layers in tp_plan: {{'{anatomy.layers}.*.(first)': 'colwise', '{anatomy.layers}.*.(second)': "
        "'rowwise'}.",
    )


def _is_module(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        return last in model.get_submodule(owner)._modules
    except AttributeError:
        return False


def _check_entry(model: Any, entry: Planned, size: int, anatomy: Anatomy) -> None:
    cut = entry.meaning.cut
    if cut is Cut.PARAMETER:
        _check_parameter(model, entry, size)
        return
    if not _is_module(model, entry.name):
        raise _wrong_kind(entry, "a parameter")
    module = model.get_submodule(entry.name)
    if cut is Cut.EXPERTS:
        if hasattr(module, "base_layer"):
            raise ModelError(
                "LoRA on fused experts is not supported under tensor parallelism.",
                where=entry.name,
                fix="Name the linear layers of attention in target_modules, or use tensor_parallel_size=1.",
            )
        check_experts(entry.name, module, size)
    elif cut in _LINEAR or cut is Cut.VOCABULARY:
        check_lora(entry.name, module)
        _check_weights(model, entry, base_layer(module), size, anatomy)


def _check_parameter(model: Any, entry: Planned, size: int) -> None:
    parameter = dict(model.named_parameters(remove_duplicate=False)).get(entry.name)
    if parameter is None:
        raise _wrong_kind(entry, "a module")
    if parameter.dim() == 0 or parameter.shape[0] % size:
        raise _does_not_divide(entry.name, size, "first dimension", parameter.shape[0] if parameter.dim() else 0)


def _check_weights(model: Any, entry: Planned, module: nn.Module, size: int, anatomy: Anatomy) -> None:
    cut = entry.meaning.cut
    weight = getattr(module, "weight", None)
    fitting = nn.Embedding if cut is Cut.VOCABULARY else nn.Linear
    if not isinstance(module, fitting):
        raise _wrong_kind(entry, f"a {type(module).__name__}")
    if weight is None or not weight.is_floating_point():
        raise ModelError(
            "quantised layers cannot be cut.", where=entry.name, fix="Use quantization=None or tensor_parallel_size=1."
        )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if not entry.name.startswith(f"{anatomy.layers}.") and not any(module is end for end in ends):
        raise ConfigurationError(
            "the module lies outside the decoder layers and is neither embedding nor head.",
            where=entry.name,
            fix="Take it out of tp_plan, or give it the style 'replicate'.",
        )
    dim = 1 if cut is Cut.ROWS else 0
    if weight.shape[dim] % size:
        what = "vocabulary" if any(module is end for end in ends) else "size"
        raise _does_not_divide(entry.name, size, what, weight.shape[dim])


def _check_heads(model: Any, entries: list[Planned], size: int) -> None:
    """Attention reshapes what a cut projection gives it into heads, so each rank must hold whole ones."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    for entry in entries:
        if entry.meaning.cut is not Cut.COLUMNS or entry.meaning.whole:
            continue
        block = model.get_submodule(entry.name.rpartition(".")[0])
        # Attention of every architecture knows the size of its heads; an MLP has none.
        if not any(hasattr(block, name) for name in ("head_dim", "head_size", "num_heads", "num_key_value_groups")):
            continue
        for what, count in (("attention heads", heads), ("key/value heads", groups)):
            if isinstance(count, int) and count % size:
                raise _does_not_divide(entry.name, size, f"number of {what}", count)


def _does_not_divide(name: str, size: int, what: str, value: int) -> ModelError:
    more = " Or pad it: model.resize_token_embeddings(pad_to_multiple_of=...)." if what == "vocabulary" else ""
    return ModelError(
        f"tensor_parallel_size={size} does not divide its {what}, {value}.",
        where=name,
        fix=f"Choose a tensor_parallel_size that does.{more}",
    )


def _wrong_kind(entry: Planned, kind: str) -> ModelError:
    return ModelError(
        f"is {kind}, which the style {entry.style!r} cannot cut.",
        where=entry.name,
        fix="Styles of linear layers need nn.Linear, 'embedding_rowwise' needs nn.Embedding and 'shard' a parameter.",
    )
