"""Quantised models with adapters train as in a plain loop over peft and bitsandbytes, evaluations included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.adapters.dora import keep_weights_in_place
from lightning_swift.adapters.quantise import guard_packing, quantised_layers
from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.errors import ModelError
from tests.adapters.models import X, by_peft, by_transformers, by_us, evaluated, train
from tests.harness.models import Tokens, save_tiny_model

# What peft is given, and what we are.
VARIANTS: dict[str, tuple[LoraSettings, dict[str, Any]]] = {
    "lora": (LoraSettings(r=4), {"target_modules": "all-linear"}),
    "rslora": (LoraSettings(r=4, rslora=True), {"target_modules": "all-linear", "use_rslora": True}),
    "dora": (LoraSettings(r=4, dora=True), {"target_modules": "all-linear", "use_dora": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), layers=2)


# peft's own DoRA loses the scales of 8-bit layers on the CPU.
@pytest.mark.parametrize(
    ("kind", "variant"), [("nf4", "lora"), ("nf4", "rslora"), ("nf4", "dora"), ("int8", "lora"), ("int8", "rslora")]
)
def test_training_is_that_of_peft_and_bitsandbytes(folder: Path, kind: str, variant: str) -> None:
    """20 steps with three evaluations between them, every loss equal, for weights read early and late."""
    settings, options = VARIANTS[variant]
    plain = by_peft(by_transformers(folder, kind, dtype=torch.float32), **options)
    expected = train(plain, evaluate=(0, 7, 13))
    assert len(set(expected)) > 20
    for lazy in (True, False):
        assert train(by_us(folder, kind, lazy=lazy, lora=settings), evaluate=(0, 7, 13)) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_quantised_layers_changes_nothing(folder: Path, reentrant: bool) -> None:
    def prepare(model: Any) -> None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})

    assert train(by_us(folder, "nf4", prepare=prepare), steps=4) == train(by_us(folder, "nf4"), steps=4)


@pytest.fixture
def packs() -> None:
    """Skips where bitsandbytes never repacks."""
    from bitsandbytes.functional import has_avx512bf16

    if not has_avx512bf16():
        pytest.skip("bitsandbytes repacks weights on CPUs with AVX512-BF16 only, and this is none")


def packed_layers(model: Any) -> int:
    states = [layer.weight.quant_state for layer in quantised_layers(model).values()]
    return sum(getattr(state, "packing_format_for_cpu", False) for state in states)


@pytest.mark.usefixtures("packs")
def test_an_evaluation_does_not_spoil_training(folder: Path) -> None:
    """The trap: unguarded, the first evaluation repacks every layer and training after it is another one."""
    held_out = Tokens(64).x[-8:]

    def build(*, guarded: bool) -> Any:
        model = by_us(folder, "nf4", dtype=torch.bfloat16)
        for layer in quantised_layers(model).values():
            assert not layer.support_avx512bf16_for_cpu
            layer.support_avx512bf16_for_cpu = not guarded
        return model

    untouched = train(build(guarded=True), steps=6)
    model = build(guarded=True)
    evaluated(model, held_out)
    assert packed_layers(model) == 0
    assert train(model, steps=6) == untouched
    spoilt = build(guarded=False)
    evaluated(spoilt, held_out)
    assert packed_layers(spoilt) > 0
    with pytest.raises(ModelError, match="repacked for inference"):
        guard_packing(spoilt)


def test_dora_leaves_the_parameters_in_place(folder: Path) -> None:
    """ZeRO-3 marks the parameter objects; peft on the CPU would assign new ones in every forward pass."""
    for kind in ("nf4", "int8"):
        model = by_us(folder, kind, lora=LoraSettings(r=2, dora=True))
        layers = quantised_layers(model)
        assert layers
        before = {name: id(layer.weight) for name, layer in layers.items()}
        model(input_ids=X, labels=X).loss.backward()
        assert {name: id(layer.weight) for name, layer in layers.items()} == before
        assert keep_weights_in_place(model) == len(layers)


def test_dora_starts_as_the_base_model(folder: Path) -> None:
    for kind in (None, "nf4", "int8"):
        plain, dora = (by_us(folder, kind, lora=LoraSettings(r=2, dora=dora)) for dora in (False, True))
        # One rounding of norm / norm per layer, and what it is multiplied with.
        assert torch.allclose(dora(X).logits, plain(X).logits, atol=1e-5)


def test_dora_trains_on_8_bit_layers(folder: Path) -> None:
    early, late = (by_us(folder, "int8", lazy=lazy, lora=VARIANTS["dora"][0]) for lazy in (False, True))
    losses = train(early, steps=6, evaluate=(3,))
    assert losses == train(late, steps=6, evaluate=(3,))
    assert all(p.grad is None and torch.isfinite(p).all() for p in early.parameters() if p.requires_grad)


def test_a_quantised_model_can_be_copied(folder: Path) -> None:
    for dora in (False, True):
        model = by_us(folder, "nf4", lora=LoraSettings(r=2, dora=dora))
        other = copy.deepcopy(model)
        expected = model(X).logits
        for layer in quantised_layers(model).values():
            layer.weight.data.zero_()
        assert torch.equal(other(X).logits, expected)
