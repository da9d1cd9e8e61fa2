"""Finds the newest whole checkpoint of a run, by what the manifests say and never by file times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_swift.checkpoint.layout import Manifest, read_manifest
from lightning_swift.checkpoint.safe_load import verify
from lightning_swift.errors import CheckpointError

__all__ = ["find_newest"]

# What a save leaves when it is killed between moving the old directory aside and moving the new one in.
_ASIDE = re.compile(r"\.(?P<name>.+)\.old-[^/]*")


def find_newest(directories: Sequence[Path]) -> Path | None:
    """The newest whole checkpoint that lies directly in one of ``directories``.

    Newest means the last started run, then the highest global step, then the latest save. Whole means that names and
    sizes agree with the manifest; hashes are compared when the checkpoint is loaded. A hidden ``.NAME.old-*`` counts
    where there is no whole ``NAME``. Unfinished, damaged and foreign directories are passed over.

    Args:
        directories: Where to look; those that do not exist are passed over.

    Returns:
        The path of the checkpoint, or None if there is none.
    """
    ranked = [(_rank(path, manifest), path) for path, manifest in _candidates(directories)]
    for _, path in sorted(ranked, reverse=True):
        if _is_whole(path):
            return path
    return None


def _candidates(directories: Sequence[Path]) -> Iterator[tuple[Path, Manifest]]:
    for directory in dict.fromkeys(directories):
        if not directory.is_dir():
            continue
        for path in directory.iterdir():
            aside = _ASIDE.fullmatch(path.name)
            if aside is not None and _is_whole(path.with_name(aside["name"])):
                continue
            if aside is None and path.name.startswith("."):
                continue
            manifest = _manifest(path)
            if manifest is not None:
                yield path, manifest


def _rank(path: Path, manifest: Manifest) -> tuple[str, int, str, bool, str]:
    # A link (save_last="link") yields to the directory it points to, and the name settles what is left.
    return manifest.run.started, manifest.global_step, manifest.created, not path.is_symlink(), path.name


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path) if path.is_dir() else None
    except (CheckpointError, OSError):
        return None


def _is_whole(path: Path) -> bool:
    try:
        verify(path, hashes=False)
    except (CheckpointError, OSError):
        return False
    return True
