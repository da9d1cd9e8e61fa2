"""Saving and loading of flat state: any placement, names compared before anything is touched, safe types only."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_swift.checkpoint.layout import METADATA, RunRecord, read_manifest
from lightning_swift.checkpoint.safe_load import verify
from lightning_swift.checkpoint.sharded import Description, load_into, load_meta, read_index, save
from lightning_swift.errors import CheckpointError, CheckpointMismatchError, UnsafeCheckpointError
from tests.harness.ranks import ranks, run_ranks

DESCRIPTION = Description(
    run=RunRecord(id="run-1", started="2026-01-01T00:00:00"), global_step=5, strategy="Test", mesh={"dp_shard": 2}
)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.even": torch.randn(8, 6, generator=generator),
        "model.uneven": torch.randn(5, 3, generator=generator),
        "model.short": torch.randn(1, 4, generator=generator),
        "model.half": torch.randn(4, 4, generator=generator).bfloat16(),
        "model.packed": torch.arange(12, dtype=torch.uint8).reshape(6, 2),
        "model.whole": torch.randn(3, generator=generator),
        "optimizer_0.state.even.step": torch.tensor(7.0),
    }


VALUES = {"optimizer_0.param_groups.even.lr": 0.5, "optimizer_0.param_groups.even.betas": (0.9, 0.95)}


def placed(value: torch.Tensor, placements: list[Any], shape: tuple[int, ...]) -> torch.Tensor:
    if value.ndim < 2:
        return value.clone()
    return distribute_tensor(value.clone(), init_device_mesh("cpu", shape), placements)


def sharded(shape: tuple[int, ...], placements: list[Any]) -> dict[str, Any]:
    return {name: placed(value, placements, shape) for name, value in tensors().items()} | VALUES


def save_sharded(path: Path, shape: tuple[int, ...], placements: list[Any]) -> None:
    save(path, state=sharded(shape, placements), meta={"epoch": 3}, description=DESCRIPTION)


def check_load(path: Path, shape: tuple[int, ...], placements: list[Any]) -> None:
    state = {
        n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for n, v in sharded(shape, placements).items()
    }
    before = {name: id(value) for name, value in state.items() if value is not None}
    report = load_into(path, state, strict=True)
    assert report.missing == report.unexpected == ()
    assert sorted(report.loaded) == sorted(state)
    for name, expected in tensors().items():
        value = state[name]
        assert id(value) == before[name], f"{name} was not filled in place"
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert full.dtype == expected.dtype
        assert torch.equal(full, expected), name
    for name, expected in VALUES.items():
        assert state[name] == expected
    assert load_meta(path) == {"epoch": 3}


PLACES = {
    "rows": (2, (2,), [Shard(0)]),
    "columns": (2, (2,), [Shard(1)]),
    "hybrid": (4, (2, 2), [Replicate(), Shard(0)]),
    "grid": (4, (2, 2), [Shard(0), Shard(1)]),
    "four": (4, (4,), [Shard(0)]),
}


@pytest.mark.parametrize(
    ("writer", "reader"), [("rows", "columns"), ("rows", "four"), ("hybrid", "rows"), ("columns", "grid")]
)
def test_any_placement_is_read_by_any_other(writer: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    size, shape, placements = PLACES[writer]
    run_ranks(save_sharded, size, (path, shape, placements))
    manifest = verify(path)
    assert manifest.tensors["model.uneven"].shape == (5, 3)
    assert manifest.tensors["model.half"].dtype == "bfloat16"
    assert len([name for name in manifest.files if name.endswith(".distcp")]) == size
    size, shape, placements = PLACES[reader]
    run_ranks(check_load, size, (path, shape, placements))


def single(path: Path, state: dict[str, Any] | None = None) -> Path:
    save(path, state=tensors() | VALUES if state is None else state, meta={"epoch": 3}, description=DESCRIPTION)
    return path


def test_one_process_saves_and_loads_without_a_process_group(tmp_path: Path) -> None:
    path = single(tmp_path / "a.ckpt")
    state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in tensors().items()}
    state |= dict.fromkeys(VALUES)
    load_into(path, state, strict=True)
    assert all(torch.equal(state[name], value) for name, value in tensors().items())
    assert verify(path).global_step == 5
    assert read_index(path)["model.even"] == (torch.Size([8, 6]), torch.float32)
    assert read_index(path)["optimizer_0.param_groups.even.lr"] is None


def test_no_path_of_the_machine_is_stored(tmp_path: Path) -> None:
    path = single(tmp_path / "a.ckpt")
    # A pickled path is stored part by part, so its last part is looked for.
    assert tmp_path.name.encode() not in (path / METADATA).read_bytes()
    assert tmp_path.name not in (path / "manifest.json").read_text()


def test_a_replicated_tensor_is_stored_once(tmp_path: Path) -> None:
    size, shape, placements = PLACES["hybrid"]
    run_ranks(save_sharded, size, (tmp_path / "a.ckpt", shape, placements))
    stored = sum(r.size for n, r in read_manifest(tmp_path / "a.ckpt").files.items() if n.endswith(".distcp"))
    content = sum(value.nbytes for value in tensors().values())
    # Each chunk and value is a zip archive of about 1.2 kB around its bytes: 5 tensors in 2 chunks and 4 in 1.
    assert stored < content + 14 * 2048


def test_names_and_shapes_are_compared_before_anything_is_touched(tmp_path: Path) -> None:
    path = single(tmp_path / "a.ckpt")
    state: dict[str, Any] = {
        "model.even": torch.zeros(8, 6),
        "model.extra": torch.zeros(2),
        "model.uneven": torch.zeros(6, 3),
        "model.packed": torch.zeros(6, 2),
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        load_into(path, state, strict=True)
    text = str(caught.value)
    assert "1 missing from the checkpoint (model.extra)" in text
    assert "6 in the checkpoint only (" in text
    assert "model.uneven ((5, 3) in the checkpoint, (6, 3) here)" in text
    assert "model.packed (torch.uint8 in the checkpoint, torch.float32 here)" in text
    assert not state["model.even"].any()


def test_a_partial_load_reports_and_still_refuses_other_shapes(tmp_path: Path) -> None:
    path = single(tmp_path / "a.ckpt")
    state: dict[str, Any] = {"model.even": torch.zeros(8, 6), "model.extra": torch.ones(2)}
    report = load_into(path, state, strict=False)
    assert report.loaded == ("model.even",)
    assert report.missing == ("model.extra",)
    assert "model.uneven" in report.unexpected
    assert torch.equal(state["model.even"], tensors()["model.even"])
    assert state["model.extra"].eq(1).all()
    with pytest.raises(CheckpointMismatchError, match=r"model\.even"):
        load_into(path, {"model.even": torch.zeros(8, 7)}, strict=False)


@ranks(2)
def test_a_mismatch_on_one_rank_is_raised_on_both(tmp_path: Path) -> None:
    import os

    path = tmp_path / "a.ckpt"
    save_sharded(path, (2,), [Shard(0)])
    state = {"model.whole": torch.zeros(3 + int(os.environ["RANK"]))}
    with pytest.raises(CheckpointMismatchError, match=r"rank 1, .*\(3,\) in the checkpoint, \(4,\) here"):
        load_into(path, state, strict=False)


def test_a_value_that_could_not_be_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"optimizer_0\.param_groups\.w\.ratio is a Fraction"):
        single(tmp_path / "a.ckpt", {"optimizer_0.param_groups.w.ratio": Fraction(1, 3)})
    assert list(tmp_path.iterdir()) == []


def test_types_that_the_user_has_allowed_are_kept(tmp_path: Path) -> None:
    state: dict[str, Any] = {"optimizer_0.param_groups.w.ratio": Fraction(1, 3)}
    with torch.serialization.safe_globals([Fraction]):
        path = single(tmp_path / "a.ckpt", state)
        found: dict[str, Any] = dict.fromkeys(state)
        load_into(path, found, strict=True)
        assert found == state
    with pytest.raises(UnsafeCheckpointError, match="ratio holds a type"):
        load_into(path, dict.fromkeys(state), strict=True)


@ranks(2)
def test_a_failure_inside_torch_is_an_error_of_ours_with_its_first_cause(tmp_path: Path) -> None:
    import os

    path = tmp_path / "a.ckpt"
    os.environ["LIGHTNING_SWIFT_FAULT"] = "middle-of-data:1:raise"
    with pytest.raises(CheckpointError, match=r"rank 1, .*no space left .* needs [\d,]+ bytes .* bytes are free"):
        save_sharded(path, (2,), [Shard(0)])
    assert list(tmp_path.iterdir()) == []
