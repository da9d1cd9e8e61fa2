"""``describe``: plain data about a checkpoint, and the reason where it is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_swift.checkpoint.inspect import describe
from lightning_swift.errors import CheckpointNotFoundError
from tests.harness.checkpoints import small_checkpoint


def test_a_whole_checkpoint_is_described(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt", tied={"b": "a"}, samples_seen=40)
    found = json.loads(json.dumps(describe(checkpoint)))
    assert found["whole"] is True
    assert found["reason"] is None
    assert found["hashes_verified"] is True
    assert (found["global_step"], found["samples_seen"], found["strategy"]) == (10, 40, "FSDPBF16Strategy")
    assert found["run"] == {"id": "run-1", "started": "2026-01-01T00:00:00Z"}
    assert found["mesh"] == {"dp_shard": 2}
    assert found["tied"] == {"b": "a"}
    dtypes = {"float32": 96, "bfloat16": 8, "float16": 6, "int64": 8, "bool": 3}
    assert found["model"] == {"tensors": 5, "parameters": 35, "bytes": 121, "dtypes": dtypes}
    assert found["optimizer"]["parameters"] == 25
    assert (
        found["bytes"]
        == sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file())
        - (checkpoint / "manifest.json").stat().st_size
    )


def test_a_damaged_checkpoint_says_why(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[-1] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)
    found = describe(checkpoint)
    assert (found["whole"], found["hashes_verified"]) == (False, False)
    assert "__0_0.distcp" in found["reason"]
    assert describe(checkpoint, hashes=False)["whole"] is True


def test_no_manifest_means_nothing_to_describe(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        describe(tmp_path)
