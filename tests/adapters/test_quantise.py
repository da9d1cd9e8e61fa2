"""Quantised layers are those of bitsandbytes bit for bit, however they are made, and stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.quantise import (
    dequantised_weight,
    element_count,
    guard_packing,
    quantisation_of,
    quantised_layers,
    quantised_weight,
)
from lightning_swift.adapters.settings import AdapterSettings
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import lazy_pretrained
from tests.adapters.models import LORA, Holder, X, by_peft, by_transformers, by_us, pretrained
from tests.harness.models import save_tiny_model, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), layers=2)


def base_state(model: Any) -> dict[str, Tensor]:
    """Everything of the frozen base that a state_dict has: packed weights, scales, and what is not quantised."""
    return {name.replace(".base_layer", ""): v for name, v in model.state_dict().items() if "lora_" not in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("int8", True)])
def test_layers_are_those_that_transformers_loads(folder: Path, kind: str, double: bool, dtype: torch.dtype) -> None:
    expected = by_transformers(folder, kind, dtype=dtype, double=double).train()
    state = base_state(expected)
    for lazy in (True, False):
        ours = by_us(folder, kind, dtype=dtype, lazy=lazy, double=double).get_base_model()
        mine = base_state(ours)
        assert mine.keys() == state.keys()
        for name, value in state.items():
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(mine[name], value), name
        guard_packing(expected)
        assert torch.equal(ours(X).logits, expected(X).logits)
        assert quantisation_of(ours) == kind


@pytest.mark.parametrize("shape", [(256, 8192), (70, 33000), (3, 5)])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_pieces_are_the_whole(shape: tuple[int, int], storage: torch.dtype) -> None:
    """More than is quantised at once, a last piece that is smaller, and less than a block."""
    from bitsandbytes.nn import Int8Params, Params4bit

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    if storage == torch.uint8 or weight.numel() % 4 == 0:
        options = {"quant_type": "nf4", "quant_storage": storage}
        ours: Any = quantised_weight(Params4bit(torch.empty_like(weight, device="meta"), **options), weight)
        theirs = Params4bit(weight, **options).to("cpu")
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
        assert ours.data.shape == theirs.data.shape
        assert element_count(ours) == weight.numel()
        mine, expected = ours.quant_state.as_dict(packed=True), theirs.quant_state.as_dict(packed=True)
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[key], expected[key]) for key in expected)
        # What is stored in float32 is rounded to the dtype of computation before it is packed.
        fine = weight.float() * (1 + 2**-10)
        assert torch.equal(fine.bfloat16(), weight)
        from_fine: Any = quantised_weight(Params4bit(torch.empty_like(weight, device="meta"), **options), fine)
        rounded = from_fine.quant_state.as_dict(packed=True)
        assert all(torch.equal(rounded[key], mine[key]) for key in mine)
        assert torch.equal(from_fine.data.view(torch.uint8), ours.data.view(torch.uint8))
    codes: Any = quantised_weight(Int8Params(torch.empty_like(weight, device="meta"), requires_grad=False), weight)
    reference: Any = Int8Params(weight, requires_grad=False).to("cpu")
    assert torch.equal(codes.data, reference.data)
    assert torch.equal(codes.SCB, reference.SCB)


def test_head_embedding_tied_and_exact_layers_are_not_quantised(folder: Path, tmp_path: Path) -> None:
    for path in (folder, save_tiny_model(tmp_path, "qwen3", layers=2)):
        model = by_us(path, "nf4", dtype=torch.bfloat16).get_base_model()
        others = {name: p for name, p in model.named_parameters() if "proj" not in name}
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in others} >= {"embed_tokens", "norm"}
        assert {type(p) for p in others.values()} == {nn.Parameter}
        assert {p.dtype for p in others.values()} == {torch.bfloat16}
        assert type(model.lm_head) is nn.Linear
        assert len(quantised_layers(model)) == 14
    holder = Holder(pretrained(folder))
    holder.model._keep_in_fp32_modules = ["down_proj"]
    report = apply_adapters(holder, AdapterSettings(LORA, "nf4"), compute_dtype=torch.float32)
    assert len(report.quantised) == 12
    assert not any("down_proj" in name for name in report.quantised)
    holder = Holder(pretrained(folder))
    first, second = (layer.mlp.up_proj for layer in holder.model.model.layers)
    second.weight = first.weight
    report = apply_adapters(holder, AdapterSettings(LORA, "nf4"), compute_dtype=torch.float32)
    assert len(report.quantised) == 12
    assert not any("up_proj" in name for name in report.quantised)


def test_a_new_head_of_a_classifier_trains(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=3)
    holder = Holder(model)
    apply_adapters(holder, AdapterSettings(LORA, "nf4"), compute_dtype=torch.bfloat16)
    trained = {name: p for name, p in holder.named_parameters() if p.requires_grad}
    assert any("score.modules_to_save" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}


def test_biases_are_kept(tmp_path: Path) -> None:
    import transformers as tf

    config = tiny_config(layers=1)
    config.attention_bias = True
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    expected = by_transformers(tmp_path, "nf4", dtype=torch.float32)
    guard_packing(expected)
    for lazy in (True, False):
        assert torch.equal(by_us(tmp_path, "nf4", lazy=lazy)(X).logits, expected(X).logits)


def test_transposed_layers_are_refused(tmp_path: Path) -> None:
    holder = Holder(lazy_pretrained(save_tiny_model(tmp_path, "gpt2", layers=1)))
    with pytest.raises(ModelError, match=r"h\.0\.attn\.c_attn.*Conv1D"):
        apply_adapters(holder, AdapterSettings(LORA, "nf4"), compute_dtype=torch.float32)


def test_a_model_that_the_user_has_quantised_is_respected(folder: Path) -> None:
    for asked in (None, "nf4"):
        holder = Holder(by_transformers(folder, "nf4", dtype=torch.float32))
        before = base_state(holder.model)
        report = apply_adapters(holder, AdapterSettings(LORA, asked), compute_dtype=torch.float32)
        assert len(report.quantised) == 14
        after = base_state(holder.model.get_base_model())
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert not any(layer.support_avx512bf16_for_cpu for layer in quantised_layers(holder).values())
    other = Holder(by_transformers(folder, "fp4", dtype=torch.float32))
    with pytest.raises(ModelError, match="quantised as fp4, and quantization='nf4'"):
        apply_adapters(other, AdapterSettings(LORA, "nf4"), compute_dtype=torch.float32)


def test_a_model_of_the_user_is_guarded_even_without_adapters(folder: Path) -> None:
    holder = Holder(by_peft(by_transformers(folder, "nf4", dtype=torch.float32), target_modules="all-linear"))
    for layer in quantised_layers(holder).values():
        layer.support_avx512bf16_for_cpu = True
    apply_adapters(holder, AdapterSettings(), compute_dtype=torch.float32)
    assert not any(layer.support_avx512bf16_for_cpu for layer in quantised_layers(holder).values())


def test_storage_that_a_cast_would_rewrite_is_refused(folder: Path) -> None:
    stored = by_transformers(folder, "nf4", dtype=torch.float32, bnb_4bit_quant_storage=torch.float32)
    with pytest.raises(ModelError, match=r"stored as torch\.float32, and a cast to torch\.bfloat16"):
        apply_adapters(Holder(stored), AdapterSettings(LORA), compute_dtype=torch.bfloat16)
    apply_adapters(Holder(stored), AdapterSettings(LORA), compute_dtype=torch.float32)
    with pytest.raises(ConfigurationError, match="storage_dtype"):
        apply_adapters(
            Holder(lazy_pretrained(folder)),
            AdapterSettings(LORA, "nf4"),
            compute_dtype=torch.bfloat16,
            storage_dtype=torch.float32,
        )


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_allowed_storage_survives_the_cast_of_an_engine(folder: Path, storage: torch.dtype) -> None:
    model = by_us(folder, "nf4", dtype=torch.bfloat16, storage_dtype=storage)
    layers = quantised_layers(model)
    before = {name: dequantised_weight(layer) for name, layer in layers.items()}
    assert {layer.weight.dtype for layer in layers.values()} == {storage}
    model.bfloat16()
    assert all(torch.equal(dequantised_weight(layer), before[name]) for name, layer in layers.items())


def test_weights_are_dequantised_without_a_trace(folder: Path) -> None:
    import bitsandbytes as bnb

    for kind in ("nf4", "int8"):
        for layer in quantised_layers(by_us(folder, kind)).values():
            weight: Any = layer.weight
            identity = torch.eye(layer.in_features)
            # The layer itself, in training mode, multiplies by exactly this matrix.
            assert torch.allclose(layer.train()(identity).T, dequantised_weight(layer), atol=1e-6)
            assert layer.weight is weight
            assert isinstance(weight, bnb.nn.Params4bit | bnb.nn.Int8Params)
