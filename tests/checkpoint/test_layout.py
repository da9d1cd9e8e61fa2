"""The manifest: a text that is complete, unchanged and typed, or is refused; file names that stay inside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_swift.checkpoint.layout import FileRecord, Manifest, RunRecord, TensorRecord, contained, read_manifest
from lightning_swift.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError


def manifest(**fields: object) -> Manifest:
    values: dict[str, object] = {
        "run": RunRecord("run", "2026-01-01"),
        "global_step": 3,
        "strategy": "FSDPBF16Strategy",
        "mesh": {"dp_shard": 2},
        "files": {".metadata": FileRecord(5, "ab")},
        "tensors": {"model.w": TensorRecord((2, 3), "float32")},
        "tied": {"b": "a"},
        "huggingface": "model",
        "weights_only": False,
        "samples_seen": None,
        "created": "2026-01-01",
        "versions": {"torch": "2"},
        "adapters": {"default": {"r": 4, "alpha": 0.1, "ü": [1, None]}},
    }
    return Manifest(**{**values, **fields})  # type: ignore[arg-type]


def test_a_manifest_survives_the_round_trip() -> None:
    assert Manifest.from_json(manifest().to_json(), where="x") == manifest()


def test_every_flipped_bit_of_a_manifest_is_refused_or_changes_nothing() -> None:
    text = manifest().to_json().encode()
    for position in range(len(text)):
        for bit in range(8):
            data = bytearray(text)
            data[position] ^= 1 << bit
            try:
                found = Manifest.from_json(data.decode(), where="x")
            except (CheckpointCorruptError, UnicodeDecodeError):
                continue
            assert found == manifest(), position


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("global_step", "3"),
        ("global_step", -1),
        ("global_step", True),
        ("mesh", {"tp": 1.5}),
        ("files", {".metadata": {"size": "5", "sha256": "ab"}}),
        ("files", {".metadata": [5, "ab"]}),
        ("files", []),
        ("tensors", {"w": {"shape": [2, "3"], "dtype": "float32"}}),
        ("tensors", {"w": {"shape": 3, "dtype": "float32"}}),
        ("tied", {"a": 1}),
        ("huggingface", 4),
        ("weights_only", 0),
        ("adapters", []),
        ("run", {"id": "x"}),
        ("surprise", 1),
    ],
)
def test_a_manifest_of_other_types_is_refused(field: str, value: object) -> None:
    from lightning_swift.checkpoint import layout

    content = {**json.loads(manifest().to_json()), field: value}
    del content["checksum"]
    content["checksum"] = layout._checksum(content)
    with pytest.raises(CheckpointCorruptError, match="not a valid manifest"):
        Manifest.from_json(json.dumps(content), where="x")


def test_another_version_names_itself() -> None:
    content = json.loads(manifest().to_json()) | {"format_version": 2}
    with pytest.raises(CheckpointCorruptError, match="format version 2 is not 1"):
        Manifest.from_json(json.dumps(content), where="x")


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "{", "[" * 100_000, '{"format_version": 1}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(text, where="x")


def test_a_name_that_occurs_twice_is_refused() -> None:
    text = manifest().to_json().replace('"global_step": 3', '"global_step": 3, "global_step": 3')
    with pytest.raises(CheckpointCorruptError, match="occurs twice"):
        Manifest.from_json(text, where="x")


def test_a_missing_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError, match="not a whole checkpoint"):
            read_manifest(path)


NAMES = ["../x", "/etc/passwd", "a/../b", "huggingface/../x", "a/b", "huggingface/a/b", "", ".", "..", "a\0b", "a b"]
NAMES += ["huggingface/", "/", "x" * 201, "a\n", "\u202e"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_outside_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        contained(tmp_path, name)


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "huggingface").symlink_to(tmp_path)
    for name in ("link", "dangling", "fifo", "folder", "huggingface/file"):
        with pytest.raises(UnsafeCheckpointError, match="not a regular file"):
            contained(tmp_path, name)
    assert contained(tmp_path, "file") == tmp_path / "file"
    assert contained(tmp_path, "absent") == tmp_path / "absent"
