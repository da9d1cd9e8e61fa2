"""Merging LoRA adapters without torch or peft equals peft's own merge; adapters come out in peft's own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_swift.checkpoint.adapter import write_adapter
from lightning_swift.checkpoint.export import check_base
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.errors import ExportError
from tests.harness.checkpoints import edit_manifest, save_checkpoint, small_checkpoint
from tests.harness.models import tiny_model


def peft_model(kind: str = "llama", *, seed: int = 0, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model(kind, layers=1), LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            elif "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def save_peft(directory: Path, model: Any) -> Path:
    configs = {name: config.to_dict() for name, config in model.peft_config.items()}
    plain = json.loads(json.dumps(configs, default=lambda v: sorted(v) if isinstance(v, set) else str(v)))
    tied = {}
    by_id: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in by_id:
            tied[f"net.{name}"] = f"net.{by_id[id(parameter)]}"
        by_id.setdefault(id(parameter), name)
    state = {f"model.net.{name}": p.detach() for name, p in model.named_parameters()}

    def companions(folder: Path) -> None:
        base = model.get_base_model()
        base.config.architectures = [type(base).__name__]
        base.config.save_pretrained(folder)

    save_checkpoint(directory, state, companions=companions, huggingface="net", adapters=plain, tied=tied)
    return directory


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_rslora": True, "lora_alpha": 16},
    {"use_dora": True},
    {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 32, "down_proj": 2}},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["embed_tokens", "q_proj"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_merge_is_that_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    model = peft_model(**options)
    checkpoint = save_peft(tmp_path / "a.ckpt", model)
    report = merge_checkpoint(checkpoint, tmp_path / "out")
    assert report.adapter == "default"
    found = load_file(tmp_path / "out" / "model.safetensors")
    # peft adds in float32; the same model in float64 is the truth that both round.
    expected = {name: p.float() for name, p in model.double().merge_and_unload().named_parameters()}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        # One rounding of float32 (2^-24 relative), where the float64 values differ by their own rounding at most.
        assert torch.allclose(found[name], tensor, rtol=2**-23, atol=1e-9), name


def test_gpt2_keeps_its_transposed_weights(tmp_path: Path) -> None:
    model = peft_model("gpt2", target_modules=["c_attn"], fan_in_fan_out=True)
    merge_checkpoint(save_peft(tmp_path / "a.ckpt", model), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: p.float() for name, p in model.double().merge_and_unload().named_parameters()}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=2**-23, atol=1e-9), name


# peft warns of exactly what is tested here.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["embed_tokens"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
    ids=["embedding", "head"],
)
def test_a_tied_model_is_untied_where_the_adapter_parts_the_two(options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = peft_model("qwen3", **options).eval()
    merge_checkpoint(save_peft(tmp_path / "a.ckpt", model), tmp_path / "out")
    # transformers itself notices two different tensors; other readers go by the config.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    tokens = torch.arange(3, 19)[None]
    # Float32 logits of about unit size from weights that differ by one rounding.
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=2e-6)


def test_a_tied_model_stays_tied_otherwise(tmp_path: Path) -> None:
    merge_checkpoint(save_peft(tmp_path / "a.ckpt", peft_model("qwen3")), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_merge_can_cast(tmp_path: Path) -> None:
    model = peft_model()
    merge_checkpoint(save_peft(tmp_path / "a.ckpt", model), tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = model.double().merge_and_unload().state_dict()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].bfloat16()), name


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_adapter_is_written_as_peft_writes_it(options: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    model = peft_model(**options).eval()
    names = write_adapter(save_peft(tmp_path / "a.ckpt", model), tmp_path / "out", verify_hashes=True)
    model.save_pretrained(tmp_path / "peft")
    found, expected = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "peft"))
    assert set(found) == set(expected) == set(names)
    assert all(torch.equal(found[name], expected[name]) for name in names)
    loaded = PeftModel.from_pretrained(tiny_model(layers=1), tmp_path / "out").eval()
    tokens = torch.arange(3, 19)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    checkpoint = save_peft(tmp_path / "a.ckpt", peft_model(target_modules=["q_proj"]))
    config = {"peft_type": "LORA", "lora_alpha": 8}
    for adapters, message in (
        ({"default": {**config, "peft_type": "IA3"}}, "IA3"),
        ({"default": {**config, "lora_bias": True}}, "lora_bias"),
        ({"default": config, "other": config}, "2 adapters"),
        ({"default": 3}, "no JSON object"),
        ({"other": config}, "not understood"),
        ({"default": {**config, "fan_in_fan_out": True, "r": 4}}, None),
    ):
        edit_manifest(checkpoint, adapters=adapters)
        if message is not None:
            with pytest.raises(ExportError, match=message):
                merge_checkpoint(checkpoint, tmp_path / "out")
    edit_manifest(checkpoint, adapters={"default": {**config, "bias": "all"}})
    with pytest.raises(ExportError, match="biases"):
        write_adapter(checkpoint, tmp_path / "out")
    with pytest.raises(ExportError, match="no adapter"):
        write_adapter(small_checkpoint(tmp_path / "b.ckpt"), tmp_path / "out")
    with pytest.raises(ExportError, match="no adapter"):
        check_base(None)
    assert not (tmp_path / "out").exists()
