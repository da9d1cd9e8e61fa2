"""Merging: the same bytes as the full tensors, under Hugging Face's names, in folders that Hugging Face loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_swift.checkpoint.casting import Caster
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.checkpoint.safetensors_writer import parse_size
from lightning_swift.errors import CheckpointCorruptError, ConfigurationError, ExportError
from tests.harness.checkpoints import edit_manifest, save_checkpoint, small_checkpoint, small_state
from tests.harness.models import tiny_model
from tests.harness.ranks import ranks


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def model_state(model: Any, prefix: str = "model.model.") -> dict[str, Any]:
    return {f"{prefix}{name}": tensor for name, tensor in model.named_parameters()}


@ranks(2)
def save_sharded_model(directory: Path, kind: str, tie: bool | None) -> None:
    """A checkpoint of a UserModule whose model is sharded by FSDP2, with optimizer state and a head of its own."""
    from torch.distributed.fsdp import fully_shard

    model = tiny_model(kind, layers=2, tie=tie)
    head = torch.nn.Linear(3, 2)
    config = model.config
    fully_shard(model)
    fully_shard(head)
    state = {**model_state(model), **model_state(head, "model.value_head."), "optimizer_0.state.x.step": torch.ones(())}
    tied = {}
    if config.tie_word_embeddings:
        tied = {"model.lm_head.weight": f"model.{next(name for name, _ in model.named_parameters())}"}

    def companions(folder: Path) -> None:
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")

    save_checkpoint(directory, state, companions=companions, huggingface="model", tied=tied)


def reference(kind: str, tie: bool | None) -> Any:
    return tiny_model(kind, layers=2, tie=tie)


@pytest.mark.parametrize(("kind", "tie"), [("llama", None), ("qwen3", None), ("gpt2", None), ("llama", True)])
def test_a_sharded_model_becomes_a_folder_that_transformers_loads(kind: str, tie: bool | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    save_sharded_model(tmp_path / "a.ckpt", kind, tie)
    report = merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", verify_hashes=True)
    model = reference(kind, tie)
    assert_same(weights(tmp_path / "out"), {name: p.detach() for name, p in model.named_parameters()})
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (report.parameters, report.dtype) == (sum(p.numel() for p in model.parameters()), "float32")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(3, 19)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_cast_model_loads_in_its_own_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_sharded_model(tmp_path / "a.ckpt", "llama", None)
    merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", dtype="bfloat16", max_shard_size="50KB")
    model = reference("llama", None).bfloat16()
    assert_same(weights(tmp_path / "out"), {name: p.detach() for name, p in model.named_parameters()})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118  # not a mapping
    sizes = [p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 50_000 + 8_000  # the limit counts data; the header comes on top


def test_the_whole_module_is_written_where_there_is_no_hugging_face_model(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt", tied={"alias": "weight"})
    report = merge_checkpoint(checkpoint, tmp_path / "out")
    expected = {name.removeprefix("model."): t for name, t in small_state().items() if name.startswith("model.")}
    assert_same(weights(tmp_path / "out"), expected)
    assert report.files == ("model.safetensors",)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_every_tensor_starts_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    state = {"model.a": torch.ones(3, dtype=torch.bool), "model.b": torch.ones(1).half(), "model.c": torch.ones(2)}
    save_checkpoint(tmp_path / "a.ckpt", state)
    merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert {name: header[name]["data_offsets"] for name in "abc"} == {"c": [0, 8], "b": [8, 10], "a": [10, 13]}


def huggingface_checkpoint(directory: Path, config: dict[str, Any], tied: dict[str, str]) -> Path:
    state = {"model.model.embed.weight": torch.ones(2, 2), "model.other.weight": torch.zeros(2, 2)}

    def companions(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config))

    save_checkpoint(directory, state, companions=companions, huggingface="model", tied=tied)
    return directory


@pytest.mark.parametrize(
    ("config", "tied", "names"),
    [
        ({"tie_word_embeddings": True}, {"model.head.weight": "model.embed.weight"}, {"embed.weight"}),
        ({}, {"model.head.weight": "model.embed.weight"}, {"embed.weight"}),
        ({"text_config": {"tie_word_embeddings": True}}, {"model.head.weight": "model.embed.weight"}, {"embed.weight"}),
        # Tied by the user, so nothing would restore the second name.
        (
            {"tie_word_embeddings": False},
            {"model.head.weight": "model.embed.weight"},
            {"embed.weight", "head.weight"},
        ),
        # Stored under a name outside the Hugging Face model.
        ({"tie_word_embeddings": True}, {"model.head.weight": "other.weight"}, {"embed.weight", "head.weight"}),
        ({"tie_word_embeddings": True}, {"other.alias": "other.weight"}, {"embed.weight"}),
    ],
)
def test_tied_names_are_written_only_where_a_loader_needs_them(
    config: dict[str, Any], tied: dict[str, str], names: set[str], tmp_path: Path
) -> None:
    checkpoint = huggingface_checkpoint(tmp_path / "a.ckpt", config, tied)
    merge_checkpoint(checkpoint, tmp_path / "out")
    assert set(weights(tmp_path / "out")) == names


def test_a_tie_to_nothing_is_refused(tmp_path: Path) -> None:
    checkpoint = huggingface_checkpoint(tmp_path / "a.ckpt", {}, {"model.head.weight": "absent"})
    with pytest.raises(CheckpointCorruptError, match="absent"):
        merge_checkpoint(checkpoint, tmp_path / "out")


def test_nested_configs_follow_the_dtype(tmp_path: Path) -> None:
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "rope": {"type": "default"}}
    checkpoint = huggingface_checkpoint(tmp_path / "a.ckpt", config, {})
    merge_checkpoint(checkpoint, tmp_path / "out", dtype="float16")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"dtype": "float16", "text_config": {"dtype": "float16"}, "rope": {"type": "default"}}


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for output in ("full", "full/file", "link", "a.ckpt"):
        with pytest.raises(ExportError, match="something is here already"):
            merge_checkpoint(checkpoint, tmp_path / output)
    with pytest.raises(ConfigurationError, match="dtype"):
        merge_checkpoint(checkpoint, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
    edit_manifest(checkpoint, quantization={"kind": "gptq", "dtype": "bfloat16", "layers": {"weight": [6, 4]}})
    with pytest.raises(ExportError, match="quantised as 'gptq'"):
        merge_checkpoint(checkpoint, tmp_path / "out")
    edit_manifest(checkpoint, quantization=None, huggingface="absent")
    with pytest.raises(ExportError, match="no weights"):
        merge_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "out").mkdir()
    merge_checkpoint(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", {"model.z": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ExportError, match="complex128"):
        merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2**31), ("10b", 10), ("3kib", 3072)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0GB", "5GBs", "1e9B", "5 G", "0.1B"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        parse_size(text)


FLOATS = ["float64", "float32", "float16", "bfloat16"]


def hard_values() -> torch.Tensor:
    """Every bfloat16 bit pattern, the ties and their neighbours around it, and what lies at the edges of float16."""
    patterns = torch.arange(1 << 16, dtype=torch.int64)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (patterns[:, None] << 16 | low).reshape(-1)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    halves = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.float16).float()
    return torch.cat([bits.view(torch.float32), halves, halves * (1 + 2**-11), halves * (1 + 3 * 2**-12)])


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_casts_are_those_of_torch_bit_for_bit(source: str, target: str) -> None:
    if source == target:
        return
    values = hard_values().to(getattr(torch, source))
    if source == "float64":
        values = torch.cat([values, values * (1 + 2**-40)])
    expected = values.to(getattr(torch, target))
    if target == "float16":
        kept = expected.isfinite() | ~values.isfinite()
        values, expected = values[kept], expected[kept]
    data = values.view(torch.uint8).numpy().tobytes()
    caster = Caster(source, target, where="t")
    size = values.element_size()
    # Blocks of different sizes reuse the scratch.
    parts = [data[: 1000 * size], data[1000 * size : 1010 * size], data[1010 * size :]]
    found = torch.frombuffer(bytearray(b"".join(bytes(caster(part)) for part in parts)), dtype=expected.dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert torch.equal(found[kept].view(bits), expected[kept].view(bits))


def test_a_cast_to_float16_that_overflows_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", {"model.big": torch.tensor([1.0, 65520.0])})
    with pytest.raises(ExportError, match=r"model\.big: 65520 is beyond"):
        merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", dtype="float16")


def test_many_tensors_over_many_threads_stay_in_place(tmp_path: Path) -> None:
    state = {f"model.{i}": torch.full((1000 + i,), float(i)) for i in range(200)}
    save_checkpoint(tmp_path / "a.ckpt", state)
    merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out")
    assert_same(weights(tmp_path / "out"), {name.removeprefix("model."): tensor for name, tensor in state.items()})


def test_memory_stays_bounded_and_torch_is_not_imported(tmp_path: Path) -> None:
    # 96 MB, one tensor transposed in columns: none of it fits in what is allowed above the interpreter.
    state = {f"model.{i}": torch.randn(1500, 2000) for i in range(8)}
    save_checkpoint(tmp_path / "a.ckpt", state)
    code = (
        "import sys, resource; from pathlib import Path; from lightning_swift.checkpoint.merge import merge_checkpoint;"
        "merge_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), dtype='bfloat16', verify_hashes=True);"
        "line = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'));"
        "print(int(line.split()[1]) // 1024, sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.ckpt", tmp_path / "out"], capture_output=True, text=True, check=True
    )
    peak, modules = done.stdout.split(maxsplit=1)
    assert modules.strip() == "[]"
    assert int(peak) <= 64
    assert_same(weights(tmp_path / "out"), {k.removeprefix("model."): v.bfloat16() for k, v in state.items()})
