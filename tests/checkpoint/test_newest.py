"""``find_newest``: by run and step, never by file time; whole checkpoints only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_swift.checkpoint.layout import RunRecord
from lightning_swift.checkpoint.newest import find_newest
from tests.harness.checkpoints import edit_manifest, small_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("newest") / "a.ckpt")


class Folder:
    def __init__(self, original: Path, path: Path) -> None:
        self.original, self.path = original, path

    def add(self, name: str, step: int, *, started: str = "2026-01-01", created: str = "2026-01-02") -> Path:
        path = self.path / name
        shutil.copytree(self.original, path)
        edit_manifest(path, global_step=step, run=RunRecord("run", started), created=created)
        return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Folder:
    return Folder(original, tmp_path)


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert find_newest([tmp_path, tmp_path / "absent", tmp_path / "file"]) is None


def test_the_highest_step_wins_whatever_the_file_times(folder: Folder) -> None:
    high, low = folder.add("a.ckpt", 20), folder.add("b.ckpt", 9)
    os.utime(high, (1, 1))
    os.utime(low, (2_000_000_000, 2_000_000_000))
    assert find_newest([folder.path]) == high


def test_the_last_started_run_wins_whatever_the_step(folder: Folder) -> None:
    folder.add("a.ckpt", 20)
    later = folder.add("b.ckpt", 3, started="2026-02-01")
    assert find_newest([folder.path]) == later


def test_among_equal_steps_the_last_saved_wins(folder: Folder) -> None:
    later = folder.add("a.ckpt", 5, created="2026-01-03")
    folder.add("b.ckpt", 5)
    assert find_newest([folder.path]) == later


def test_several_folders_are_searched(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    folder.add("one/a.ckpt", 1)
    newest = folder.add("two/a.ckpt", 2)
    assert find_newest([tmp_path / "one", tmp_path / "two"]) == newest


@pytest.mark.parametrize("damage", ["manifest", "cut", "missing", "extra", "garbage"])
def test_a_damaged_one_is_passed_over(folder: Folder, damage: str) -> None:
    whole, newest = folder.add("a.ckpt", 1), folder.add("b.ckpt", 2)
    if damage == "manifest":
        (newest / "manifest.json").unlink()
    elif damage == "cut":
        os.truncate(newest / "__0_0.distcp", 100)
    elif damage == "missing":
        (newest / "__0_0.distcp").unlink()
    elif damage == "extra":
        (newest / "__7_0.distcp").touch()
    else:
        (newest / "manifest.json").write_text("{")
    assert find_newest([folder.path]) == whole


def test_unfinished_ones_are_never_taken(folder: Folder) -> None:
    whole = folder.add("a.ckpt", 1)
    folder.add(".b.ckpt.tmp-0123abcd", 2)
    assert find_newest([folder.path]) == whole


def test_one_moved_aside_counts_while_its_name_is_missing_or_damaged(folder: Folder) -> None:
    folder.add("a.ckpt", 1)
    aside = folder.add(".last.ckpt.old-0123abcd", 5)
    assert find_newest([folder.path]) == aside
    replaced = folder.add("last.ckpt", 3)
    assert find_newest([folder.path]) == replaced
    (replaced / "manifest.json").unlink()
    assert find_newest([folder.path]) == aside


def test_a_link_yields_to_what_it_points_to(folder: Folder) -> None:
    real = folder.add("a.ckpt", 1)
    (folder.path / "last.ckpt").symlink_to("a.ckpt")
    assert find_newest([folder.path]) == real
