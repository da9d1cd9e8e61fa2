"""``lora=`` of the sharded strategy: first values, checkpointing, the user's own adapters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import UserModule, save_tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import Lora, PlainModule, fit
from tests.parallel.test_lora_parity import Lazy

LORA = LoraSettings(r=4)


def _first_values(folder: str, *, seed: int, drawn: int) -> list[dict[str, Any]]:
    """Adapters of a pretrained model read early and late, after other numbers have been drawn on each rank."""
    values = []
    for lazy in (False, True):
        seed_everything(seed, verbose=False)
        torch.randn(drawn + dist.get_rank())
        _, recorded = fit(Lazy(folder, lazy=lazy), FSDPBF16Strategy("32-true", lora=LORA), steps=1)
        values.append({name: weight.tolist() for name, weight in recorded.weights.items() if "lora_A" in name})
    return values


one_rank, two_ranks = ranks(1)(_first_values), ranks(2)(_first_values)


def test_first_values_depend_on_the_seed_alone(tmp_path) -> None:
    # A's gradient is exactly zero at the first step, so after it A is what it was, less the weight decay.
    folder = str(save_tiny_model(tmp_path, layers=1))
    early, late = one_rank(folder, seed=1, drawn=1)
    assert early
    for other in (late, *two_ranks(folder, seed=1, drawn=7)):
        assert early == other
    (elsewhere, _) = one_rank(folder, seed=2, drawn=1)
    assert not any(early[name] == value for name, value in elsewhere.items())


class Reentrant(UserModule):
    """Switches the model's own checkpointing on before any adapter is there."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.activation_checkpointing_enable({"use_reentrant": self.reentrant})


@ranks(2)
def test_checkpointing_by_the_model_changes_nothing() -> None:
    # A reentrant checkpoint whose inputs need no gradient would silently train nothing.
    expected, reference = fit(UserModule(), FSDPBF16Strategy("32-true", lora=LORA), steps=4)
    for reentrant in (True, False):
        module, recorded = fit(Reentrant(reentrant=reentrant), FSDPBF16Strategy("32-true", lora=LORA), steps=4)
        assert module.losses == expected.losses
        assert all(torch.equal(recorded.weights[name], w) for name, w in reference.weights.items())


class Loaded(UserModule):
    """A 4-bit model of the user's own loading."""

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, quantization_config=config)


class TwoModels(UserModule):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            other = UserModule()
            other.configure_model()
            self.reference = other.model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), layers=1))


@ranks(1)
def test_modules_that_do_not_fit_are_refused(folder: str) -> None:
    refusals: list[tuple[Any, LoraSettings | None, str]] = [
        (Lora(), LORA, "holds adapters already.*get_peft_model"),
        (PlainModule(), LORA, "holds none"),
        (TwoModels(), LORA, r"2 Hugging Face models \(model, reference\)"),
        (UserModule(), LoraSettings(target_modules=["nowhere"]), "target_modules.*nowhere"),
        (UserModule(), LoraSettings(target_modules="(("), "target_modules"),
        (Loaded(folder=folder), None, "is quantised.*ZeRO3QLoRAStrategy"),
        (Loaded(folder=folder), LORA, "is quantised"),
    ]
    for module, lora, told in refusals:
        with pytest.raises(ModelError, match=told):
            fit(module, FSDPBF16Strategy("32-true", lora=lora), steps=1)


def test_packed_weights_and_sharding_are_refused_by_name() -> None:
    for quantization in ("nf4", "int8"):
        with pytest.raises(ConfigurationError, match=r"quantization='.*data_parallel_shard"):
            FSDPBF16Strategy(lora=LORA, quantization=quantization)
    with pytest.raises(ConfigurationError, match="without lora= nothing trains"):
        FSDPBF16Strategy(quantization="nf4")
    with pytest.raises(ConfigurationError, match="is not a LoraSettings"):
        FSDPBF16Strategy(lora={"r": 8})  # type: ignore[arg-type]


@ranks(2)
def test_the_users_own_adapters_are_trained_as_they_are() -> None:
    module, recorded = fit(Lora(), FSDPBF16Strategy("32-true"), steps=2)
    reference, expected = fit(Lora(), "ddp", steps=2)
    assert module.losses == reference.losses
    assert all(torch.equal(recorded.weights[name], w) for name, w in expected.weights.items())


@ranks(1)
def test_a_second_fit_keeps_the_adapters() -> None:
    module, _ = fit(UserModule(), FSDPBF16Strategy("32-true", lora=LORA), steps=1)
    wrapped = module.model
    for lora in (LORA, None):
        fit(module, FSDPBF16Strategy("32-true", lora=lora), steps=1)
        assert module.model is wrapped


def test_adapters_are_written_in_yaml(tmp_path) -> None:
    from jsonargparse import ArgumentParser
    from lightning.pytorch.strategies import Strategy

    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(Strategy, "strategy")
    path = tmp_path / "strategy.yaml"
    path.write_text(
        "strategy:\n  class_path: lightning_swift.FSDPBF16Strategy\n"
        "  init_args:\n    lora: {r: 8, target_modules: [q_proj, v_proj]}\n"
    )
    for extra, expected in (
        ([], LoraSettings(r=8, target_modules=["q_proj", "v_proj"])),
        (["--strategy.init_args.lora.r=2"], LoraSettings(r=2, target_modules=["q_proj", "v_proj"])),
        (["--strategy.init_args.lora.dora=true"], LoraSettings(r=8, target_modules=["q_proj", "v_proj"], dora=True)),
    ):
        strategy = parser.instantiate(parser.parse_args([f"--config={path}", *extra])).strategy
        assert strategy.options.lora == expected
