"""Activation checkpointing of transformer blocks, on the instance: no wrapper module, no changed parameter name.

The ``forward`` of each chosen block is shadowed by a small callable that runs the block's own ``forward`` under
``torch.utils.checkpoint`` (non-reentrant, so frozen bases with adapters get their gradients; random state restored,
so dropout draws the same masks again). Hooks of the block, FSDP's among them, stay outside and run once per pass.
Works on plain, compiled and sharded blocks; :func:`remove_checkpointing` undoes it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.blocks import class_names, find_blocks

__all__ = ["CheckpointingMode", "CheckpointingSettings", "apply_checkpointing", "remove_checkpointing"]

CheckpointingMode = Literal["full", "selective", "every_n"]

# Operators whose outputs "selective" keeps, by torch.ops.aten name: matrix products and the attention kernels of
# every device. They cost most of the time of a block; everything between them is cheap to compute again.
_KEPT = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward"),
)


@dataclass(frozen=True)
class CheckpointingSettings:
    """Which blocks are checkpointed, and what of them is kept.

    Args:
        mode: ``"full"`` keeps only the inputs of each block; ``"selective"`` also keeps the outputs of its matrix
            products and attention; ``"every_n"`` is ``"full"`` on every ``every_n``-th block.
        every_n: Distance of the checkpointed blocks in mode ``"every_n"``, starting with the first block.
        blocks: Class names of the modules to checkpoint; None means the repeated blocks found in the model.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    mode: CheckpointingMode = "full"
    every_n: int = 1
    blocks: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        modes = get_args(CheckpointingMode)
        if self.mode not in modes:
            raise ConfigurationError(
                f"mode={self.mode!r} is not one of {', '.join(modes)}.", where="activation checkpointing"
            )
        if self.every_n < 1:
            raise ConfigurationError(f"every_n={self.every_n} must be 1 or more.", where="activation checkpointing")
        blocks: object = self.blocks
        if isinstance(blocks, str) or blocks == ():
            raise ConfigurationError(
                f"blocks={blocks!r} is not a list of class names.", where="activation checkpointing"
            )


class _CheckpointedForward:
    """Shadows ``forward`` of one block. Refers to the block only, so the model still copies and pickles."""

    def __init__(self, block: nn.Module, settings: CheckpointingSettings) -> None:
        self.block = block
        self.settings = settings
        # An instance-level forward of somebody else (quantisers, offloaders) is kept and called.
        self.inner: Callable[..., Any] | None = block.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original())

    def _original(self) -> Callable[..., Any]:
        # Looked up at each call: fully_shard replaces the class of the block after this object was made.
        if self.inner is not None:
            return self.inner
        forward: Callable[..., Any] = type(self.block).forward.__get__(self.block)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self._original()(*args, **kwargs)
        if getattr(self.block, "gradient_checkpointing", False):
            raise _already_checkpointed(type(self.block).__name__)
        # Dynamo traces a checkpoint without contexts, or with a plain function for them, and no other form.
        contexts: dict[str, Any] = {"context_fn": _selective_contexts} if self.settings.mode == "selective" else {}
        return checkpoint(
            self._original(),
            *(_without_cache(value) for value in args),
            use_reentrant=False,
            preserve_rng_state=True,
            **contexts,
            **{name: _without_cache(value) for name, value in kwargs.items()},
        )


def apply_checkpointing(root: nn.Module, settings: CheckpointingSettings) -> int:
    """Checkpoint the blocks of ``root`` in training mode; call it before compile and ``fully_shard``.

    Applying equal settings again changes nothing. The KV cache of Hugging Face models is off while they train (their
    config is left alone), since recomputation would write to it twice.

    Returns:
        The number of blocks that are checkpointed.

    Raises:
        ConfigurationError: No such blocks, or blocks that something else checkpoints already.
    """
    applied = [shadow.settings for shadow in map(_shadow, root.modules()) if shadow is not None]
    if applied and set(applied) == {settings}:
        return len(applied)
    _refuse_double(root)
    blocks = _choose(root, settings)
    for name, block in blocks:
        _refuse_running_statistics(name, block)
    for module in root.modules():
        if _takes_use_cache(module):
            module.register_forward_pre_hook(_turn_cache_off, with_kwargs=True)
    for _, block in blocks:
        # nn.Module.__setattr__ puts a callable that is no module into the instance's own dictionary.
        block.forward = _CheckpointedForward(block, settings)
    return len(blocks)


def remove_checkpointing(root: nn.Module) -> int:
    """Undo :func:`apply_checkpointing` below ``root``; return the number of blocks it was taken off."""
    removed = 0
    for module in root.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _turn_cache_off]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        shadow = _shadow(module)
        if shadow is not None:
            del module.__dict__["forward"]
            if shadow.inner is not None:
                module.forward = shadow.inner
            removed += 1
    return removed


def _shadow(module: nn.Module) -> _CheckpointedForward | None:
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, _CheckpointedForward) else None


def _choose(root: nn.Module, settings: CheckpointingSettings) -> list[tuple[str, nn.Module]]:
    if settings.blocks is None:
        blocks = find_blocks(root)
        if not blocks:
            raise ConfigurationError(
                f"no repeated blocks were found in {type(root).__name__}.",
                where="activation checkpointing",
                fix=f"Name their classes with blocks=[...]. {_classes(root)}",
            )
    else:
        blocks = _by_class(root, settings.blocks)
    return blocks[:: settings.every_n] if settings.mode == "every_n" else blocks


def _by_class(root: nn.Module, names: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    found = [(name, module) for name, module in root.named_modules() if name and class_names(module) & set(names)]
    for missing in sorted(set(names).difference(*(class_names(module) for _, module in found))):
        known = {_own_class(module) for name, module in root.named_modules() if name}
        near = difflib.get_close_matches(missing, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(
            f"no module of {type(root).__name__} is a {missing!r}.",
            where="activation checkpointing, blocks",
            fix=hint + _classes(root),
        )
    paths = {name for name, _ in found}
    for name in sorted(paths):
        outer = next((path for path in paths if name.startswith(path + ".")), None)
        if outer is not None:
            raise ConfigurationError(
                f"{name} lies inside {outer}, and both would be checkpointed.",
                where="activation checkpointing, blocks",
                fix="Name only one of their classes.",
            )
    return found


def _own_class(module: nn.Module) -> str:
    sharded = [kind.__name__ for kind in type(module).__bases__]
    return sharded[1] if sharded[0] == "FSDPModule" else type(module).__name__


def _classes(root: nn.Module) -> str:
    found = {_own_class(module) for _, module in find_blocks(root)}
    found |= {_own_class(module) for name, module in root.named_modules() if name and any(module.children())}
    return f"The classes in this model are: {', '.join(sorted(found)) or 'none'}."


def _refuse_double(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise _already_checkpointed(name or type(root).__name__)
        if hasattr(module, "_checkpoint_wrapped_module"):
            raise ConfigurationError(
                f"{name} is wrapped by torch's checkpoint_wrapper already.",
                where="activation checkpointing",
                fix="Remove that wrapper or this callback.",
            )
        if _shadow(module) is not None:
            raise ConfigurationError(
                f"{name} is checkpointed already, with other settings.",
                where="activation checkpointing",
                fix="Use one ActivationCheckpointing callback only.",
            )


def _already_checkpointed(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} has Hugging Face's own gradient checkpointing on, and would be computed three times.",
        where="activation checkpointing",
        fix="Remove the call of gradient_checkpointing_enable() (peft's prepare_model_for_kbit_training makes it too, "
        "unless use_gradient_checkpointing=False) or this callback.",
    )


def _refuse_running_statistics(name: str, block: nn.Module) -> None:
    for inner, module in block.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ConfigurationError(
                f"{name}.{inner} is a {type(module).__name__}, whose running statistics recomputation would update a "
                "second time.",
                where="activation checkpointing",
                fix="Checkpoint blocks without batch norm by blocks=[...], or use another normalisation.",
            )


def _takes_use_cache(module: nn.Module) -> bool:
    # Where forward only has **kwargs (peft), the module inside takes the argument.
    if not hasattr(getattr(module, "config", None), "use_cache"):
        return False
    return "use_cache" in inspect.signature(module.forward).parameters


def _turn_cache_off(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    if not (module.training and torch.is_grad_enabled()):
        return None
    return args, {**kwargs, "use_cache": False}


def _without_cache(value: Any) -> Any:
    # Every cache class of transformers has this method, whatever the name of the argument that carries it.
    return None if hasattr(value, "get_seq_length") else value


@cache
def _kept_operators() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in _KEPT if hasattr(torch.ops.aten, name)]
    kept = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return frozenset([*kept, torch.ops.higher_order.flex_attention])


def _keep(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _kept_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep)
