"""Folders for optimizer state on disk: one for each engine, none left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._zero_swap import SwapFolder, swapping_apart


class User:
    """Something that a folder is for."""


def config(path: Path, device: str = "nvme") -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": str(path)}}}


def folders(parent: Path) -> set[Path]:
    return {path for path in parent.iterdir() if path.is_dir()}


def test_each_engine_has_its_own_and_it_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    given, users = config(tmp_path), [User(), User()]
    for user in users:
        completed, folder = swapping_apart(given)
        assert folder is not None
        assert completed["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(folder.path)
        folder.remove_after(user)
    assert given == config(tmp_path), "the strategy's own configuration names the user's folder"
    assert len(folders(tmp_path)) == 3
    del user
    users.clear()
    assert folders(tmp_path) == {tmp_path / "other"}


def test_a_killed_run_s_folder_is_removed_by_the_next_and_one_in_use_is_not(tmp_path: Path) -> None:
    kept, killed = SwapFolder.within(tmp_path), SwapFolder.within(tmp_path)
    # What a process that this one forks would do.
    replace(kept, owner=0).remove()
    (killed.path / "x.swp").touch()
    # The system does that for a process that is killed.
    os.close(killed.lock)
    assert folders(tmp_path) == {kept.path, killed.path}
    latest = SwapFolder.within(tmp_path)
    assert folders(tmp_path) == {kept.path, latest.path}
    latest.remove()
    kept.remove()


def test_nothing_is_made_where_nothing_is_swapped_or_can_be(tmp_path: Path) -> None:
    for given in ({"zero_optimization": {"stage": 2}}, config(tmp_path, "cpu")):
        assert swapping_apart(given) == (given, None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="nvme_path="):
        swapping_apart(config(tmp_path / "file" / "below"))
