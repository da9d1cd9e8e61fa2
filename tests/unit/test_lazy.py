"""Lazily built models equal loaded ones, and folders that cannot be used are refused before weights are read."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import is_lazy, lazy_folder, lazy_pretrained, load_lazy_weights
from tests.harness.models import save_tiny_model

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma", "gpt2"]
X = torch.arange(3, 35)[None]


def reference(folder: Path, kind: Any = None) -> Any:
    from transformers import AutoModelForCausalLM

    return (kind or AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "llama", layers=2)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("shard", ["5GB", "200KB"])
def test_a_loaded_lazy_model_is_the_pretrained_model(tmp_path: Path, kind: str, shard: str) -> None:
    folder = save_tiny_model(tmp_path, kind, max_shard_size=shard)
    assert (folder / "model.safetensors").exists() == (shard == "5GB")
    expected = reference(folder)
    model = lazy_pretrained(folder)
    assert is_lazy(model)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())

    report = load_lazy_weights(model, device="cpu")

    assert not is_lazy(model)
    assert model.training == expected.training
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    for (name, ours), (_, theirs) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*expected.named_parameters(), *expected.named_buffers()],
        strict=True,
    ):
        assert torch.equal(ours, theirs), name
        assert ours.requires_grad == theirs.requires_grad
    assert torch.equal(model(X).logits, expected(X).logits)
    assert report.bytes_read == sum(p.numel() * p.element_size() for p in expected.parameters())
    assert report.unexpected == ()


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_tied_weights_stay_one_parameter(tmp_path: Path, kind: str) -> None:
    model = lazy_pretrained(save_tiny_model(tmp_path, kind))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    load_lazy_weights(model, device="cpu")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_tied_weight_stored_under_its_other_name_is_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path, "qwen3", layers=1)
    expected = reference(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = lazy_pretrained(folder)
    load_lazy_weights(model, device="cpu")
    assert torch.equal(model(X).logits, expected(X).logits)


def test_a_tied_weight_stored_twice_is_read_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path, "qwen3", layers=1)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = lazy_pretrained(folder)
    report = load_lazy_weights(model, device="cpu")
    assert report.bytes_read == sum(p.numel() * p.element_size() for p in model.parameters())
    assert report.unexpected == ()


def test_generation_settings_come_from_the_folder(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"max_new_tokens": 7, "eos_token_id": [2, 5]}))
    model = lazy_pretrained(folder)
    assert model.generation_config.max_new_tokens == 7
    assert model.generation_config.eos_token_id == [2, 5]
    path.write_text("{")
    with pytest.raises(ModelError, match="generation_config"):
        lazy_pretrained(folder)


def test_the_base_model_prefix_is_added_or_dropped(tmp_path: Path) -> None:
    from transformers import AutoModel

    whole = save_tiny_model(tmp_path / "whole", "gpt2", layers=1)
    expected = reference(whole)
    base = lazy_pretrained(whole, AutoModel)
    load_lazy_weights(base, device="cpu")
    assert torch.equal(base(X).last_hidden_state, expected.transformer(X).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    model = lazy_pretrained(tmp_path / "base")
    load_lazy_weights(model, device="cpu")
    assert torch.equal(model(X).logits, expected(X).logits)


def test_weights_that_nothing_asks_for_are_reported(folder: Path) -> None:
    from transformers import AutoModel

    report = load_lazy_weights(lazy_pretrained(folder, AutoModel), device="cpu")
    assert report.unexpected == ("lm_head.weight",)


def test_missing_weights_are_listed(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    with pytest.raises(ModelError, match=r"'score\.weight'.*from_pretrained"):
        lazy_pretrained(folder, AutoModelForSequenceClassification)


def test_another_shape_is_refused_before_reading(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"\[256, 64\] in the folder and \[300, 64\] in the model"):
        lazy_pretrained(folder, vocab_size=300)


def test_overrides_are_applied_and_unknown_ones_refused(folder: Path) -> None:
    model = lazy_pretrained(folder, rms_norm_eps=0.5, attn_implementation="eager")
    assert model.config.rms_norm_eps == 0.5
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ConfigurationError, match="'rms_norm_epsilon'"):
        lazy_pretrained(folder, rms_norm_epsilon=0.5)


def test_masters_are_float32_whatever_the_folder_holds(tmp_path: Path) -> None:
    from tests.harness.models import tiny_model

    tiny_model(layers=1).to(torch.bfloat16).save_pretrained(tmp_path)
    model = lazy_pretrained(tmp_path)
    report = load_lazy_weights(model, device="cpu")
    expected = reference(tmp_path)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(model(X).logits, expected(X).logits)
    assert report.bytes_read == 2 * sum(p.numel() for p in expected.parameters())
    half = lazy_pretrained(tmp_path, dtype="bfloat16")
    load_lazy_weights(half, device="cpu")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigurationError, match="float64"):
        lazy_pretrained(tmp_path, dtype="float64")  # type: ignore[arg-type]


def test_persistent_buffers_come_from_the_folder(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=2, num_channels=1
    )
    model = tf.ResNetForImageClassification(config)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean += 3
    model.save_pretrained(tmp_path)
    ours = lazy_pretrained(tmp_path, tf.AutoModelForImageClassification)
    load_lazy_weights(ours, device="cpu")
    for (name, a), (_, b) in zip(ours.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_an_empty_model_says_so_when_it_is_called(folder: Path) -> None:
    model = lazy_pretrained(folder)
    with pytest.raises(ModelError, match="not been read"):
        model(X)
    load_lazy_weights(model, device="cpu")
    assert not model._forward_pre_hooks
    model(X)


def test_a_copy_remembers_the_folder(folder: Path) -> None:
    model = copy.deepcopy(lazy_pretrained(folder))
    assert is_lazy(model)
    assert lazy_folder(model) == folder
    load_lazy_weights(torch.nn.ModuleDict({"inner": model}), device="cpu")
    assert torch.equal(model(X).logits, reference(folder)(X).logits)
    assert lazy_folder(model) == folder


def test_building_leaves_torch_as_it_was(folder: Path) -> None:
    from torch.nn.modules import module
    from transformers import AutoModelForImageClassification

    before = dict(module._global_parameter_registration_hooks)
    lazy_pretrained(folder)
    with pytest.raises(ConfigurationError, match="Linear"):
        lazy_pretrained(folder, torch.nn.Linear)
    with pytest.raises(ModelError, match="AutoModelForImageClassification cannot build"):
        lazy_pretrained(folder, AutoModelForImageClassification)
    assert dict(module._global_parameter_registration_hooks) == before
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_buffers_are_real_under_any_default_device(folder: Path) -> None:
    with torch.device("meta"):
        model = lazy_pretrained(folder)
    assert not any(b.is_meta for b in model.buffers())


def test_other_modules_are_left_alone() -> None:
    module = torch.nn.Linear(2, 2)
    assert not is_lazy(module)
    assert load_lazy_weights(module, device="cpu").tensors == 0
    assert lazy_folder(module) is None


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_adapters_around_a_lazy_model(folder: Path, init: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"], r=8, init_lora_weights=init)
    expected = get_peft_model(reference(folder), config)
    model = get_peft_model(lazy_pretrained(folder), config)
    load_lazy_weights(model, device="cpu")
    assert not is_lazy(model)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad, name
        assert ours.shape == theirs.shape
        if "lora_" in name:
            # Drawn from the same distribution: 512 and more values fix a deviation to a few per cent.
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.2), name
        else:
            assert torch.equal(ours, theirs), name
    if init is True:
        assert torch.equal(model(X).logits, expected(X).logits)


def test_adapters_do_not_depend_on_the_state_of_the_generator(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = get_peft_model(lazy_pretrained(folder), LoraConfig(target_modules="all-linear", r=2))
        state = torch.get_rng_state()
        load_lazy_weights(model, device="cpu")
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append({n: p for n, p in model.named_parameters() if "lora_A" in n})
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert len({p.sum().item() for p in drawn[0].values()}) == len(drawn[0])


def test_adapters_that_need_the_weights_are_refused(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules="all-linear", r=2, init_lora_weights="orthogonal")
    model = get_peft_model(lazy_pretrained(folder), config)
    with pytest.raises(ModelError, match="from_pretrained"):
        load_lazy_weights(model, device="cpu")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_magnitudes_of_dora_come_from_the_weights(tmp_path: Path, kind: str) -> None:
    from peft import LoraConfig, get_peft_model

    folder = save_tiny_model(tmp_path, kind, layers=2)
    config = LoraConfig(target_modules="all-linear", r=2, use_dora=True, fan_in_fan_out=kind == "gpt2")
    model = get_peft_model(lazy_pretrained(folder), copy.deepcopy(config))
    load_lazy_weights(model, device="cpu")
    expected = dict(get_peft_model(reference(folder), config).named_parameters())
    compared = {name: p for name, p in model.named_parameters() if "magnitude" in name}
    assert compared
    assert all(torch.equal(p, expected[name]) and p.requires_grad for name, p in compared.items())


def test_an_adapter_left_empty_is_refused(folder: Path) -> None:
    model = lazy_pretrained(folder)
    model.extra = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ModelError, match=r"'extra\.weight'"):
        load_lazy_weights(model, device="cpu")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def needs_own_code(folder: Path) -> None:
    change_config(folder, model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (folder / "code.py").write_text("raise SystemExit('code of the folder was run')")


def index(folder: Path, file: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"nothing.weight": file}}))


def fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def cut(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, length if length >= 0 else path.stat().st_size + length)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("elsewhere")), "not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not an object"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "can run code"),
    "cut": (lambda f: cut(f, -1), "is damaged"),
    "cut header": (lambda f: cut(f, 4), "is damaged"),
    "foreign code": (needs_own_code, "never run"),
    "unknown type": (lambda f: change_config(f, model_type="mine"), "no model type 'mine'"),
    "bad value": (lambda f: change_config(f, hidden_size="many"), "describes no model"),
    "quantised": (lambda f: change_config(f, quantization_config={"quant_method": "gptq"}), "stored quantised"),
    "fifo": (fifo, "has neither"),
    "parent": (lambda f: index(f, "../model.safetensors"), "leads out of it"),
    "absolute": (lambda f: index(f, str(f / "model.safetensors")), "leads out of it"),
    "missing file": (lambda f: index(f, "other.safetensors"), "is missing"),
    "wrong name": (lambda f: index(f, "model.safetensors"), r"'nothing\.weight'"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_unusable_folders_are_refused(folder: Path, how: str) -> None:
    damage, message = DAMAGE[how]
    damage(folder)
    with pytest.raises(ModelError, match=message):
        lazy_pretrained(folder)


def test_code_beside_a_known_architecture_is_not_run(folder: Path) -> None:
    needs_own_code(folder)
    change_config(folder, model_type="llama")
    model = lazy_pretrained(folder)
    assert type(model).__module__.startswith("transformers.")
