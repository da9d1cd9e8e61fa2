"""A merge that is killed or fails leaves no half folder, and the next one succeeds."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_swift.checkpoint.faults import FAULT_VARIABLE
from lightning_swift.checkpoint.merge import FAULTPOINTS, merge_checkpoint
from lightning_swift.checkpoint.output import fresh_folder
from lightning_swift.errors import ExportError
from tests.harness.checkpoints import save_checkpoint, small_checkpoint, small_state
from tests.harness.signals import interruptible

MERGE = (
    "import sys; from pathlib import Path; from lightning_swift.checkpoint.merge import merge_checkpoint;"
    "merge_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), verify_hashes=True)"
)


def merge(checkpoint: Path, output: Path, fault: str | None) -> int:
    env = {**os.environ, **({} if fault is None else {FAULT_VARIABLE: fault})}
    return subprocess.run(
        [sys.executable, "-c", MERGE, checkpoint, output], env=env, capture_output=True, check=False
    ).returncode


@pytest.mark.parametrize("point", FAULTPOINTS)
@pytest.mark.parametrize("existing", [False, True], ids=["absent", "empty"])
def test_a_killed_merge_leaves_no_folder_and_the_next_succeeds(point: str, existing: bool, tmp_path: Path) -> None:
    checkpoint, output = small_checkpoint(tmp_path / "a.ckpt"), tmp_path / "out"
    if existing:
        output.mkdir()
    assert merge(checkpoint, output, f"{point}:0:kill") == -signal.SIGKILL
    assert not (output.exists() and any(output.iterdir()))
    assert (tmp_path / ".out.partial").is_dir()
    (tmp_path / ".out.partial" / "left-over").touch()
    assert merge(checkpoint, output, None) == 0
    assert [p.name for p in output.iterdir()] == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "out"]


@pytest.mark.parametrize("point", FAULTPOINTS)
def test_a_full_disk_leaves_nothing(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    with monkeypatch.context() as patch:
        patch.setenv(FAULT_VARIABLE, f"{point}:0:raise")
        with pytest.raises(OSError, match="fault injected"):
            merge_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]
    merge_checkpoint(checkpoint, tmp_path / "out")


def test_a_real_limit_on_file_size_ends_the_merge_cleanly(tmp_path: Path) -> None:
    import torch

    save_checkpoint(tmp_path / "a.ckpt", {**small_state(), "model.large": torch.zeros(1 << 20)})
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));" + MERGE
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.ckpt", tmp_path / "out"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]


def test_two_merges_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / ".out.partial").mkdir()
    other = os.open(tmp_path / ".out.partial", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        (tmp_path / ".out.partial" / "theirs").touch()
        with pytest.raises(ExportError, match="another process"):
            merge_checkpoint(checkpoint, tmp_path / "out")
        assert (tmp_path / ".out.partial" / "theirs").exists()
    finally:
        os.close(other)
    merge_checkpoint(checkpoint, tmp_path / "out")


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with fresh_folder(tmp_path / "out") as folder:
            (folder / "mine").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").touch()

    with pytest.raises(ExportError, match="here already"):
        write()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["theirs"]
    assert not (tmp_path / ".out.partial").exists()


def test_an_interrupt_clears_up(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "a.ckpt")
    env = {**os.environ, FAULT_VARIABLE: "merge-before-config:0:sleep=600"}
    process = subprocess.Popen(
        [sys.executable, "-c", MERGE, checkpoint, tmp_path / "out"], env=env, stderr=-3, preexec_fn=interruptible
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.partial" / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]
