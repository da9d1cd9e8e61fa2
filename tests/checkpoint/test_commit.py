"""The commit protocol by itself: whole or not at all, the same error on every rank, nothing foreign replaced."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from lightning_swift.checkpoint import sharded
from lightning_swift.checkpoint.commit import commit, is_checkpoint, locate, record_file, remove
from lightning_swift.checkpoint.layout import MANIFEST, FileRecord, Manifest, RunRecord, read_manifest
from lightning_swift.checkpoint.locks import lock_folder
from lightning_swift.checkpoint.safe_load import check_hashes
from lightning_swift.checkpoint.sharded import Description
from lightning_swift.errors import CheckpointError, CheckpointNotFoundError
from tests.harness.ranks import ranks

Write = Callable[[Path], dict[str, FileRecord]]


def manifest(files: dict[str, FileRecord], *, step: int = 1, run: str = "run-1") -> Manifest:
    return Manifest(
        run=RunRecord(id=run, started="2026-01-01T00:00:00"),
        global_step=step,
        strategy="Test",
        mesh={},
        files=files,
        tensors={},
        tied={},
        huggingface=None,
        weights_only=False,
        samples_seen=None,
        created="2026-01-01T00:00:00",
        versions={},
    )


def writer(text: str) -> Write:
    def write(directory: Path) -> dict[str, FileRecord]:
        name = f"__{os.environ.get('RANK', '0')}_0.distcp"
        (directory / name).write_text(text)
        return {name: record_file(directory / name)}

    return write


def save(path: Path, text: str = "new", *, step: int = 1, run: str = "run-1") -> None:
    commit(path, writer(text), lambda files: manifest(files, step=step, run=run), run_id=run)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_one_process_commits_without_torch_distributed(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "er" / "a.ckpt", step=7)
    found = read_manifest(tmp_path / "deep" / "er" / "a.ckpt")
    assert found.global_step == 7
    check_hashes(tmp_path / "deep" / "er" / "a.ckpt", found)
    assert names(tmp_path / "deep" / "er") == ["a.ckpt"]
    assert names(tmp_path / "deep" / "er" / "a.ckpt") == ["__0_0.distcp", MANIFEST]


@ranks(2)
def test_every_rank_hashes_what_it_wrote(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    found = read_manifest(tmp_path / "a.ckpt")
    assert sorted(found.files) == ["__0_0.distcp", "__1_0.distcp"]
    check_hashes(tmp_path / "a.ckpt", found)


@ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_leaves_no_trace(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", "old")

    def fail(directory: Path) -> dict[str, FileRecord]:
        if os.environ["RANK"] == "1":
            raise ValueError("no such luck")
        return writer("new")(directory)

    with pytest.raises(CheckpointError, match=r"a\.ckpt: writing failed on rank 1: ValueError: no such luck"):
        commit(tmp_path / "a.ckpt", fail, manifest, run_id="run-1")
    assert names(tmp_path) == ["a.ckpt"]
    assert (tmp_path / "a.ckpt" / "__0_0.distcp").read_text() == "old"


@ranks(2)
def test_a_rank_that_is_interrupted_stays_so_and_the_others_hear_of_it(tmp_path: Path) -> None:
    interrupted: dict[int, WRAPPED_EXCEPTION] = {1: (KeyboardInterrupt(), StackSummary())}

    def write(directory: Path) -> dict[str, FileRecord]:
        # What torch.distributed.checkpoint raises on every rank when Ctrl-C hits rank 1 while it writes.
        raise CheckpointException("write", interrupted)

    mine = os.environ["RANK"] == "1"
    told = None if mine else "writing failed on rank 1: KeyboardInterrupt"
    with pytest.raises(KeyboardInterrupt if mine else CheckpointError, match=told):
        commit(tmp_path / "a.ckpt", write, manifest, run_id="run-1")
    assert names(tmp_path) == []


def test_ctrl_c_while_torch_writes_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupt)
    run = RunRecord(id="run-1", started="2026-01-01T00:00:00")
    description = Description(run=run, global_step=1, strategy="Test", mesh={})
    with pytest.raises(KeyboardInterrupt):
        sharded.save(tmp_path / "a.ckpt", state={"model.a": torch.ones(2)}, meta={}, description=description)
    assert names(tmp_path) == []


@ranks(2)
def test_an_error_of_rank_zero_reaches_the_others(tmp_path: Path) -> None:
    def fail(files: dict[str, FileRecord]) -> Manifest:
        raise OSError(errno.EDQUOT, "quota")

    with pytest.raises(CheckpointError, match=r"rank 0, .*no space left .*bytes are free"):
        commit(tmp_path / "a.ckpt", writer("new"), fail, run_id="run-1")
    assert names(tmp_path) == []


def test_the_same_name_of_the_same_run_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", "old", step=1)
    save(tmp_path / "last.ckpt", "new", step=2)
    assert read_manifest(tmp_path / "last.ckpt").global_step == 2
    assert names(tmp_path) == ["last.ckpt"]


def test_a_file_is_replaced_by_a_directory(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_text("a file of plain Lightning")
    save(tmp_path / "last.ckpt")
    assert names(tmp_path) == ["last.ckpt"]
    assert read_manifest(tmp_path / "last.ckpt").global_step == 1


@pytest.mark.parametrize("target", ["there.ckpt", "gone.ckpt"])
def test_a_link_is_replaced_and_its_target_is_left_alone(tmp_path: Path, target: str) -> None:
    save(tmp_path / "there.ckpt", "target", run="run-2")
    (tmp_path / "last.ckpt").symlink_to(target)
    save(tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert names(tmp_path) == ["last.ckpt", "there.ckpt"]
    assert (tmp_path / "there.ckpt" / "__0_0.distcp").read_text() == "target"


def test_a_checkpoint_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", "theirs", run="run-2")
    with pytest.raises(CheckpointError, match=r"another run \(run-2\).*Resume that run"):
        save(tmp_path / "last.ckpt", "mine")
    assert names(tmp_path) == ["last.ckpt"]
    assert (tmp_path / "last.ckpt" / "__0_0.distcp").read_text() == "theirs"


def test_what_is_not_a_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a checkpoint is here"):
        save(tmp_path / "home")
    with pytest.raises(CheckpointError, match="not deleted"):
        remove(tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_removal_of_a_directory_a_file_a_link_and_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_text("file")
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    remove(tmp_path / "link.ckpt")
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]
    for name in ("a.ckpt", "b.ckpt", "never.ckpt"):
        remove(tmp_path / name)
    assert names(tmp_path) == []


def test_remains_of_a_removal_that_was_cut_short_can_be_removed(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / MANIFEST).unlink()
    assert is_checkpoint(tmp_path / "a.ckpt")
    remove(tmp_path / "a.ckpt")
    assert names(tmp_path) == []


def test_leftovers_of_dead_saves_with_the_name_are_cleaned_and_others_kept(tmp_path: Path) -> None:
    for name in (".a.ckpt.tmp-0123abcd", ".b.ckpt.tmp-0123abcd", ".a.ckpt.tmp-mine"):
        (tmp_path / name).mkdir()
    save(tmp_path / "a.ckpt")
    assert names(tmp_path) == [".a.ckpt.tmp-mine", ".b.ckpt.tmp-0123abcd", "a.ckpt"]


def test_a_save_that_is_under_way_elsewhere_is_not_cleaned_away(tmp_path: Path) -> None:
    busy = tmp_path / ".a.ckpt.tmp-0123abcd"
    busy.mkdir()
    lock = lock_folder(busy)
    try:
        save(tmp_path / "a.ckpt")
        assert names(tmp_path) == [busy.name, "a.ckpt"]
    finally:
        os.close(lock)
    save(tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_after_a_crash_between_the_renames_the_old_one_is_found_and_put_back(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, "old", step=1)
    aside = tmp_path / ".last.ckpt.old-0123abcd"
    path.rename(aside)
    assert locate(path) == aside
    save(path, "new", step=2)
    assert names(tmp_path) == ["last.ckpt"]
    assert read_manifest(path).global_step == 2


def test_after_a_crash_behind_the_renames_the_old_one_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, "old", step=1)
    path.rename(tmp_path / ".last.ckpt.old-0123abcd")
    save(tmp_path / "other.ckpt", "new", step=2)
    (tmp_path / "other.ckpt").rename(path)
    assert locate(path) == path
    save(path, "newer", step=3)
    assert names(tmp_path) == ["last.ckpt"]
    assert read_manifest(path).global_step == 3


def test_an_old_one_comes_back_when_its_successor_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, "old", step=1)
    with monkeypatch.context() as patch:
        patch.setenv("LIGHTNING_SWIFT_FAULT", "between-renames:0:raise")
        with pytest.raises(CheckpointError, match="no space left"):
            save(path, "new", step=2)
    assert names(tmp_path) == ["last.ckpt"]
    assert read_manifest(path).global_step == 1


def test_nothing_at_the_path_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint here"):
        locate(tmp_path / "never.ckpt")


def test_no_decision_is_made_by_file_times(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", "old", step=1)
    os.utime(tmp_path / "a.ckpt", (time.time() + 1e6,) * 2)
    save(tmp_path / "a.ckpt", "new", step=2)
    assert read_manifest(tmp_path / "a.ckpt").global_step == 2


def test_records_are_those_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    record = record_file(tmp_path / "f")
    assert record == FileRecord(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert replace(record, size=4) != record


def test_files_are_synced_before_the_rename_and_the_parent_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def logged_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".tmp-")[0])
        sync(descriptor)

    def logged_rename(source: Path, target: Path) -> None:
        done.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(os, "rename", logged_rename)
    save(tmp_path / "a.ckpt")
    assert done == ["__0_0.distcp", MANIFEST, ".a.ckpt", "rename to a.ckpt", tmp_path.name]
