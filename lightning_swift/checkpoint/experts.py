"""Fused experts in an output folder: the names that Hugging Face folders and inference engines have for them.

transformers keeps all experts of a layer in one tensor, ``[experts, rows, columns]``, and folders have a tensor for
each expert and projection. In row-major order the bytes are the same, one expert after the other and in each one
projection below the other, so nothing is copied: the tensor is written once under many names. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_swift.checkpoint.safetensors_writer import OutputTensor, Part

__all__ = ["FAMILIES", "ExpertNames", "with_expert_names"]


@dataclass(frozen=True)
class ExpertNames:
    """How a family of architectures names its experts in folders.

    Args:
        renamed: Part of the names in memory and what folders have in its place.
        gate_up: Names of the two projections that are one tensor in memory, in its order.
        down: Name of the third.
    """

    renamed: tuple[str, str]
    gate_up: tuple[str, str]
    down: str


_MIXTRAL = ExpertNames((".mlp.", ".block_sparse_moe."), ("w1", "w3"), "w2")
_QWEN = ExpertNames((".mlp.", ".mlp."), ("gate_proj", "up_proj"), "down_proj")

#: ``model_type`` of a config to its names. A test compares them with what transformers itself writes.
FAMILIES: Mapping[str, ExpertNames] = {
    "mixtral": _MIXTRAL,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "dots1"), _QWEN),
}

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def with_expert_names(tensors: Iterable[OutputTensor], config: Mapping[str, Any] | None) -> list[OutputTensor]:
    """``tensors`` under the names of folders, where ``config`` is that of a family with fused experts."""
    family = FAMILIES.get(str((config or {}).get("model_type")))
    if family is None:
        return list(tensors)
    return [_renamed(tensor, family) for tensor in tensors]


def _renamed(tensor: OutputTensor, family: ExpertNames) -> OutputTensor:
    name = tensor.name.replace(*family.renamed)
    for ending, projections in ((_GATE_UP, family.gate_up), (_DOWN, (family.down,))):
        if name.endswith(ending) and len(tensor.shape) == 3:
            experts, rows, columns = tensor.shape
            prefix = name.removesuffix(ending)
            shape = (rows // len(projections), columns)
            parts = [
                Part(f"{prefix}.experts.{number}.{projection}.weight", shape)
                for number in range(experts)
                for projection in projections
            ]
            return replace(tensor, name=name, parts=tuple(parts))
    return replace(tensor, name=name)
