"""What the layer code of each architecture in transformers does that changes its memory. Read from its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """Switches of a decoder's layer code.

    Args:
        norm: ``"rms"``: Llama's, which casts back before it scales. ``"gemma"``: scales in FP32. ``"layer"``: with
            mean and bias, one fused operator.
        norms: Norms per layer.
        qk_norm: Norm of queries and keys: per head, over all heads, or none.
        gated: Feed-forward part with a gate.
        qkv_bias: Bias of the query, key and value projections.
        out_bias: Bias of the attention's output projection.
        mlp_bias: Bias of the feed-forward matrices.
        rotary: Rotary positions (otherwise learned or none).
        learned_positions: An embedding of positions.
        fused_qkv: One matrix for queries, keys and values.
        softcap: Logits go through a tanh.
        scaled_embedding: The embedding's output is multiplied by a constant, in a second tensor.
        scores_in_fp32: Experts are weighted in FP32, in a product of that size.
        composed_gelu: The activation is written as eight elementary operators.
        tied: What ``tie_word_embeddings`` is where the file does not say.
    """

    norm: Literal["rms", "gemma", "layer"] = "rms"
    norms: int = 2
    qk_norm: Literal["none", "head", "all"] = "none"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rotary: bool = True
    learned_positions: bool = False
    fused_qkv: bool = False
    softcap: bool = False
    scaled_embedding: bool = False
    scores_in_fp32: bool = False
    composed_gelu: bool = False
    tied: bool = False

    def with_switches(self, config: Mapping[str, Any]) -> Family:
        """The same family with what a configuration switches on or off."""
        changes: dict[str, Any] = {}
        if config.get("attention_bias") is not None and self.rotary:
            changes = {"qkv_bias": bool(config["attention_bias"]), "out_bias": bool(config["attention_bias"])}
        if config.get("mlp_bias") is not None:
            changes["mlp_bias"] = bool(config["mlp_bias"])
        if self.softcap:
            changes["softcap"] = config.get("final_logit_softcapping", 30.0) is not None
        return replace(self, **changes)


_GEMMA = Family(norm="gemma", norms=4, scaled_embedding=True, tied=True)
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(scores_in_fp32=True),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "qwen3_moe": Family(qk_norm="head"),
    "gemma": replace(_GEMMA, norms=2),
    "gemma2": replace(_GEMMA, softcap=True),
    "gemma3": replace(_GEMMA, qk_norm="head"),
    "gemma3_text": replace(_GEMMA, qk_norm="head"),
    "gpt2": Family(
        norm="layer",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rotary=False,
        learned_positions=True,
        fused_qkv=True,
        composed_gelu=True,
        tied=True,
    ),
}
