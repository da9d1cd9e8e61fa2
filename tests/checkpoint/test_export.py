"""An exported folder is the trained model: the same tensors and logits, or an error and no folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_swift.checkpoint import export, export_verify
from lightning_swift.checkpoint.export import ExportReport, export_checkpoint
from lightning_swift.checkpoint.export_logits import digests_of, logits_of, token_ids
from lightning_swift.errors import CheckpointError, ConfigurationError, ExportError
from tests.harness.checkpoints import save_checkpoint, small_checkpoint, write_manifest
from tests.harness.exports import checkpoint_of, reload_here
from tests.harness.models import tiny_config, tiny_model

KINDS = ["llama", "qwen3", "mistral", "gemma", "gpt2"]


@pytest.fixture
def here() -> Any:
    with reload_here() as environments:
        yield environments


def adapted(base: Path, kind: str = "llama", **options: Any) -> Any:
    """A peft model on the folder ``base``, with factors that do something."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    tiny_model(kind).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True} if kind == "gpt2" else {}
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **targets, **options}
    model = get_peft_model(model, LoraConfig(**config))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_the_model_bit_for_bit(kind: str, tmp_path: Path, here: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(kind).eval()
    report = export_checkpoint(checkpoint_of(model, tmp_path / "c.ckpt"), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = token_ids(model.config)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert digests_of(loaded) == digests_of(model)
    assert report.max_logit_gap == 0
    assert (report.tokens, report.tensors, report.dtype) == (64, len(model.state_dict()), "float32")
    files = {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()}
    assert (set(report.files), report.nbytes) == (files.keys(), sum(files.values()))
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.slow
def test_the_check_runs_in_a_fresh_process(tmp_path: Path) -> None:
    report = export_checkpoint(checkpoint_of(tiny_model("qwen3"), tmp_path / "c.ckpt"), tmp_path / "out")
    assert report.verified
    assert report.max_logit_gap == 0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_cast_folder_is_the_cast_model_bit_for_bit(kind: str, dtype: Any, tmp_path: Path, here: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(kind)
    report = export_checkpoint(checkpoint_of(model, tmp_path / "c.ckpt"), tmp_path / "out", dtype=dtype)
    assert (report.max_logit_gap, report.dtype) == (0, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(loaded.dtype)), name


def test_several_files(tmp_path: Path, here: Any) -> None:
    checkpoint = checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt")
    report = export_checkpoint(checkpoint, tmp_path / "out", max_shard_size="100KB")
    assert sum(name.endswith(".safetensors") for name in report.files) > 3
    assert report.max_logit_gap == 0


def test_a_resized_vocabulary(tmp_path: Path, here: Any) -> None:
    model = tiny_model("qwen3")
    model.resize_token_embeddings(261, mean_resizing=False)
    report = export_checkpoint(checkpoint_of(model, tmp_path / "c.ckpt"), tmp_path / "out")
    assert report.max_logit_gap == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 261


def test_heads_next_to_the_model_are_left_out(tmp_path: Path, here: Any) -> None:
    model = tiny_model("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    state = {f"model.inner.lm.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {"model.value_head.weight": torch.zeros(1, 64), "optimizer_0.param_groups.value_head.weight.lr": 0.1}
    save_checkpoint(tmp_path / "c.ckpt", state, companions=model.config.save_pretrained, huggingface="inner.lm")
    report = export_checkpoint(tmp_path / "c.ckpt", tmp_path / "out")
    assert (report.max_logit_gap, report.tensors) == (0, len(model.state_dict()))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_are_merged_up_to_rounding(kind: str, tmp_path: Path, here: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted(tmp_path / "base", kind).eval()
    checkpoint = checkpoint_of(model, tmp_path / "c.ckpt")
    report = export_checkpoint(checkpoint, tmp_path / "out")
    ids = token_ids(model.config)
    expected = logits_of(model, ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    gap = float((logits_of(loaded, ids) - expected).abs().max())
    assert gap == report.max_logit_gap
    # float32 rounds at 6e-8; the product is added to 64-wide sums of three layers: about ten roundings of logits
    # below 4. The allowance itself is 1e-4 of the largest logit.
    assert 0 < gap < 5e-6
    unadapted = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert float((logits_of(unadapted, ids) - expected).abs().max()) > 1e-2, "the adapter does something"


def test_adapters_merged_and_cast(tmp_path: Path, here: Any) -> None:
    checkpoint = checkpoint_of(adapted(tmp_path / "base"), tmp_path / "c.ckpt")
    report = export_checkpoint(checkpoint, tmp_path / "out", dtype="bfloat16")
    # Eight bits of mantissa: one rounding is 2^-8 = 0.4 % of a weight, and errors of 64 weights partly cancel.
    assert report.max_logit_gap is not None
    assert 0 < report.max_logit_gap < 0.03


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_the_adapter_alone_is_the_model_bit_for_bit(options: Any, tmp_path: Path, here: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(tmp_path / "base", **options).eval()
    checkpoint = checkpoint_of(model, tmp_path / "c.ckpt")
    report = export_checkpoint(checkpoint, tmp_path / "out", format="adapter")
    assert report.max_logit_gap == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = token_ids(model.config)
    assert torch.equal(logits_of(PeftModel.from_pretrained(base, tmp_path / "out"), ids), logits_of(model, ids))


def test_an_adapter_without_its_base_is_refused(tmp_path: Path, here: Any) -> None:
    checkpoint = checkpoint_of(adapted(tmp_path / "base"), tmp_path / "c.ckpt")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ExportError, match="no folder on this machine"):
        export_checkpoint(checkpoint, tmp_path / "out", format="adapter")
    report = export_checkpoint(checkpoint, tmp_path / "out", format="adapter", verify=False)
    assert (report.verified, report.max_logit_gap) == (False, None)


def test_an_adapter_is_asked_of_a_model_without_one(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt")
    with pytest.raises(ExportError, match="holds no adapter"):
        export_checkpoint(checkpoint, tmp_path / "out", format="adapter", verify=False)


def test_mixed_dtypes_keep_their_bits(tmp_path: Path, here: Any) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    model.model.norm.float()
    report = export_checkpoint(checkpoint_of(model, tmp_path / "c.ckpt"), tmp_path / "out")
    assert report.max_logit_gap == 0
    assert load_file(tmp_path / "out/model.safetensors")["model.norm.weight"].dtype == torch.float32


# Faults that a merge could have; each must be noticed by the process that reloads.
def _change(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[5, 3] ^= 1


def _swap(tensors: dict[str, torch.Tensor]) -> None:
    a, b = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.self_attn.o_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.extra"] = torch.zeros(2)


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()


FAULTS = {
    _one_bit: "1 of 30 tensors",
    _swap: "2 of 30 tensors",
    _drop: "1 missing",
    _add: "1 unexpected",
    _cut: "1 mis-shaped",
}


@pytest.mark.parametrize(("change", "message"), FAULTS.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_wrong_folder_is_not_left_behind(
    change: Any, message: str, tmp_path: Path, here: Any, monkeypatch: Any
) -> None:
    merge = export.merge_checkpoint

    def wrong(checkpoint: Path, output: Path, **kwargs: Any) -> Any:
        report = merge(checkpoint, output, **kwargs)
        _change(output, change)
        return report

    monkeypatch.setattr(export, "merge_checkpoint", wrong)
    checkpoint = checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt")
    with pytest.raises(ExportError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["c.ckpt"]


def test_logits_alone_catch_a_stale_layer_of_a_merged_adapter(tmp_path: Path, here: Any, monkeypatch: Any) -> None:
    merge = export.merge_checkpoint

    def wrong(checkpoint: Path, output: Path, **kwargs: Any) -> Any:
        report = merge(checkpoint, output, **kwargs)
        base = load_file(tmp_path / "base/model.safetensors")
        name = "model.layers.1.self_attn.v_proj.weight"
        _change(output, lambda tensors: tensors.update({name: base[name]}))
        return report

    monkeypatch.setattr(export, "merge_checkpoint", wrong)
    checkpoint = checkpoint_of(adapted(tmp_path / "base"), tmp_path / "c.ckpt")
    with pytest.raises(ExportError, match="logits differ from the trained model's"):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_not_a_number_is_no_match(tmp_path: Path) -> None:
    expected = export_verify.Expected([0], torch.zeros(1, 2), tolerance=1e9)
    with pytest.raises(ExportError, match="differ"):
        export_verify._gap(tmp_path, torch.tensor([[0.0, float("nan")]]), expected)
    with pytest.raises(ExportError, match="shape"):
        export_verify._gap(tmp_path, torch.zeros(1, 3), expected)


@pytest.mark.slow
def test_a_folder_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ExportError, match=r"does not load: .*no-such-model"):
        export_verify.verify_folder(tmp_path / "out", export_verify.Expected([1], torch.zeros(1, 1)))


def test_the_fresh_process_knows_nothing_of_the_launcher(tmp_path: Path, here: Any, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "7")
    export_checkpoint(checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt"), tmp_path / "out")
    assert "7" not in here[0].values()
    assert here[0]["HF_HUB_OFFLINE"] == "1"


def test_modules_without_one_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no Hugging Face model, or several.*lightning-swift merge"):
        export_checkpoint(small_checkpoint(tmp_path / "c.ckpt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_occupied_output_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    with pytest.raises(ExportError, match="something is here already"):
        export_checkpoint(checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt"), tmp_path / "out")
    assert (tmp_path / "out/precious").read_text() == "x"


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt")
    shard = next(checkpoint.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=shard.name):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path, here: Any) -> None:
    model = tiny_model("llama")
    checkpoint = checkpoint_of(model, tmp_path / "c.ckpt")
    config = checkpoint / "huggingface/config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "num_hidden_layers": 4}))
    write_manifest(checkpoint, huggingface="model")
    with pytest.raises((CheckpointError, ExportError), match=r"layers\.3"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_class_of_the_users_own_is_exported_only_unverified(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tiny_model("llama"), tmp_path / "c.ckpt")
    config = checkpoint / "huggingface/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MyOwnModel"]}))
    write_manifest(checkpoint, huggingface="model")
    with pytest.raises(ExportError, match=r"no model class 'MyOwnModel'.*verify=False"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert isinstance(export_checkpoint(checkpoint, tmp_path / "out", verify=False), ExportReport)


@pytest.mark.parametrize(
    "wrong", [{"format": "gguf"}, {"dtype": "int8"}, {"format": "adapter", "dtype": "bfloat16"}], ids=str
)
def test_wrong_options_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        export_checkpoint(tmp_path / "c.ckpt", tmp_path / "out", **wrong)


def test_the_tokens_reach_the_last_row_of_the_embedding() -> None:
    ids = token_ids(tiny_config("llama", vocab=300))
    assert len(ids) == 64
    assert 299 in ids
    assert max(ids) < 300
