"""What tensor parallelism cannot do is refused before any communication, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_swift.errors import ConfigurationError, ModelError, SwiftError
from lightning_swift.parallel.tensor import TensorParallelSettings, check_tensor_parallel
from tests.harness.models import tiny_model

PLAIN = TensorParallelSettings()


@pytest.mark.parametrize("kind", ["gpt2", "opt", "falcon", "bloom"])
def test_a_model_without_a_plan(kind: str) -> None:
    with pytest.raises(ModelError, match="publishes no tensor-parallel plan") as caught:
        check_tensor_parallel(tiny_model(kind, layers=2), 2, PLAIN)
    assert "tensor_parallel_size=1" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "options", "text"),
    [
        (4, {}, "does not divide its number of key/value heads, 2"),
        (3, {}, "does not divide its (size|vocabulary|number)"),
        (2, {"vocab": 251}, r"vocabulary, 251\. .*pad_to_multiple_of"),
    ],
)
def test_sizes_that_do_not_divide(size: int, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        check_tensor_parallel(tiny_model("llama", layers=2, **options), size, PLAIN)


def test_experts_that_cannot_be_shared() -> None:
    model = tiny_model("mixtral", layers=2)
    model.config.num_attention_heads = model.config.num_key_value_heads = 8
    with pytest.raises(ModelError, match="4 experts cannot be shared by 8"):
        check_tensor_parallel(model, 8, PLAIN)


def test_gathered_projections_have_no_heads_to_divide() -> None:
    # Phi-3 gathers its fused projection, so 2 key/value heads do not stop 4 ranks.
    check_tensor_parallel(tiny_model("phi3", layers=2), 4, PLAIN)


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (
            {"model.layers.*.mlp.up_proj": "columnwise"},
            ConfigurationError,
            "style 'columnwise'.* is unknown.*'colwise'",
        ),
        ({"layers.*.mlp.up_proj": "colwise"}, ConfigurationError, "matches no module.*'model.layers.*.mlp.up_proj'"),
        ({"model.norm": "colwise"}, ModelError, "is a LlamaRMSNorm, which the style 'colwise' cannot cut"),
        ({"model.layers.*.mlp.up_proj.weight": "colwise"}, ModelError, "is a parameter"),
        ({"model.layers.*.mlp.up_proj": "shard"}, ModelError, "is a module"),
        ({"model.layers.*.mlp": "moe_tp_experts"}, ModelError, "no layer of fused experts"),
        ({"model.layers.*.mlp.up_proj": "embedding_rowwise"}, ModelError, "is a Linear"),
    ],
)
def test_user_plans(plan: dict[str, str], error: type[SwiftError], text: str) -> None:
    with pytest.raises(error, match=text):
        check_tensor_parallel(tiny_model("llama", layers=2), 2, TensorParallelSettings(plan=plan))


def test_a_layer_outside_the_decoder() -> None:
    model = tiny_model("llama", layers=2)
    model.model.norm = nn.Linear(64, 64)
    with pytest.raises(ConfigurationError, match="outside the decoder layers"):
        check_tensor_parallel(model, 2, TensorParallelSettings(plan={"model.norm": "colwise"}))


def test_fused_qkv_of_another_class() -> None:
    plan = {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"}
    with pytest.raises(ModelError, match="is a Conv1D"):
        check_tensor_parallel(tiny_model("gpt2", layers=2), 2, TensorParallelSettings(plan=plan))


def test_quantised_layers() -> None:
    model = tiny_model("llama", layers=2)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(ModelError, match="quantised layers cannot be cut"):
        check_tensor_parallel(model, 2, PLAIN)


def test_sequence_parallelism_needs_a_cut_head() -> None:
    settings = TensorParallelSettings(sequence_parallel=True, plan={"lm_head": "replicate"})
    with pytest.raises(ModelError, match="need a plan that cuts the output head"):
        check_tensor_parallel(tiny_model("llama", layers=2), 2, settings)


def test_a_style_of_a_published_plan_that_is_not_supported() -> None:
    model = tiny_model("llama", layers=2)
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(ModelError, match="style 'packed_colwise', which is not supported"):
        check_tensor_parallel(model, 2, PLAIN)
