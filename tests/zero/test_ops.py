"""Kernels that DeepSpeed compiles: what is needed, a lock that nobody holds, and missing tools."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies import _zero_ops as zero_ops


def lock(folder: Path, *, minutes: float) -> Path:
    path = folder / "lock"
    path.touch()
    then = time.time() - 60 * minutes
    os.utime(path, (then, then))
    return path


def test_a_lock_that_nobody_holds_is_named_instead_of_waited_for(tmp_path: Path) -> None:
    path = lock(tmp_path, minutes=10)
    with pytest.raises(ConfigurationError, match="killed 10 minutes ago") as caught:
        zero_ops.check_lock(tmp_path)
    assert f"rm {path}" in str(caught.value)


def test_a_lock_that_is_held_or_new_is_waited_for(tmp_path: Path) -> None:
    path = lock(tmp_path, minutes=10)
    with path.open():
        assert zero_ops.check_lock(tmp_path)
    lock(tmp_path, minutes=0.5)
    assert zero_ops.check_lock(tmp_path)
    path.unlink()
    assert not zero_ops.check_lock(tmp_path)


def test_only_what_a_run_uses_is_compiled() -> None:
    def names(**kwargs: Any) -> list[str]:
        return [op.builder for op in zero_ops.ops_for(**kwargs)]

    assert names(device_type="cuda", offload="none") == []
    assert names(device_type="cpu", offload="none") == ["ShareMemCommBuilder"]
    assert names(device_type="cuda", offload="cpu") == ["CPUAdamBuilder"]
    assert names(device_type="cuda", offload="nvme") == ["CPUAdamBuilder", "AsyncIOBuilder"]


class Builder:
    """Of an op that is not there."""

    name = "cpu_adam"
    _loaded_ops: dict[str, Any] = {}  # noqa: RUF012
    error: Exception = RuntimeError("Error building extension 'cpu_adam': x.cpp:1: error: no such thing")

    def load(self, verbose: bool) -> None:
        raise self.error

    def is_compatible(self, verbose: bool) -> bool:
        return False


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    accelerator = SimpleNamespace(create_op_builder=lambda _: made)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    return made


def test_a_stale_lock_stops_a_run_before_it_hangs(builder: Builder, tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    lock(tmp_path / "cpu_adam", minutes=20)
    with pytest.raises(ConfigurationError, match="delete it"):
        zero_ops.prepare_ops(zero_ops.ops_for(device_type="cuda", offload="cpu"))


def test_missing_tools_are_named_with_their_cure(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, nvme = zero_ops.ops_for(device_type="cuda", offload="nvme")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match=r"C\+\+ compiler \(no-such-compiler\)") as caught:
        zero_ops.prepare_ops([cpu])
    assert "apt install g++" in str(caught.value)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("shutil.which", lambda name: None if name == "ninja" else "/usr/bin/" + name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install ninja"):
        zero_ops.prepare_ops([cpu])
    monkeypatch.undo()
    monkeypatch.setattr(
        "deepspeed.accelerator.get_accelerator", lambda: SimpleNamespace(create_op_builder=lambda _: builder)
    )
    builder.name = "no_such_async_io"
    with pytest.raises(ConfigurationError, match="libaio-dev"):
        zero_ops.prepare_ops([nvme])


def test_what_the_compiler_says_is_passed_on(builder: Builder) -> None:
    op, _ = zero_ops.ops_for(device_type="cuda", offload="nvme")
    with pytest.raises(ConfigurationError, match=r"x\.cpp:1: error: no such thing"):
        zero_ops.prepare_ops([op])
    builder.error = RuntimeError("CUDA_HOME does not exist, unable to compile CUDA op(s)")
    with pytest.raises(ConfigurationError, match="CUDA toolkit") as caught:
        zero_ops.prepare_ops([op])
    assert "set CUDA_HOME" in str(caught.value)


def test_the_ninja_of_this_environment_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import ninja

    # An environment that is not activated, on a machine with a ninja of its own.
    monkeypatch.setenv("PATH", os.defpath)
    with zero_ops._own_ninja():
        assert Path(str(shutil.which("ninja"))).parent == Path(ninja.BIN_DIR)
    assert os.environ["PATH"] == os.defpath
