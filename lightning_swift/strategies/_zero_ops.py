"""Compiles what DeepSpeed compiles on first use, before training starts: once, visibly, and never waiting for ever.

DeepSpeed builds its kernels with ninja where they are first needed, in silence, and a build that was killed leaves a
lock for which every later run waits without end or message. Here the lock is looked at first, missing tools are named
with their cure, and what is built and how long it took is said.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_swift.errors import ConfigurationError

__all__ = ["Op", "build_directory", "check_lock", "ops_for", "prepare_ops"]

# Seconds for which a lock that no process of this machine holds may belong to another machine with the same folder.
_LOCK_GRACE = 120.0
_LOCK = "lock"


@dataclass(frozen=True)
class Op:
    """A kernel that DeepSpeed compiles on first use.

    Args:
        builder: Name of DeepSpeed's builder for it.
        purpose: What it is for, as a message says it.
    """

    builder: str
    purpose: str


_SHARED_MEMORY = Op("ShareMemCommBuilder", "communication of CPU ranks through shared memory")
_CPU_ADAM = Op("CPUAdamBuilder", "Adam in host memory, for offload_optimizer")
_ASYNC_IO = Op("AsyncIOBuilder", 'reading and writing of offload_optimizer="nvme"')


def ops_for(*, device_type: str, offload: str) -> list[Op]:
    """What a run needs.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        offload: Where the optimizer's state lies: ``"none"``, ``"cpu"`` or ``"nvme"``.
    """
    ops = [_SHARED_MEMORY] if device_type == "cpu" else []
    if offload != "none":
        ops.append(_CPU_ADAM)
    return [*ops, _ASYNC_IO] if offload == "nvme" else ops


def prepare_ops(ops: list[Op]) -> None:
    """Load each op, compiling it if this machine has not done so yet. Every rank of a machine may call it at once.

    Raises:
        ConfigurationError: A tool or header is missing, the compiler fails, or a lock is left from a killed build.
    """
    from deepspeed.accelerator import get_accelerator

    for op in ops:
        builder: Any = get_accelerator().create_op_builder(op.builder)
        if builder is None or builder.name in type(builder)._loaded_ops:
            continue
        _load(builder, op)


def build_directory(name: str) -> Path:
    """Where torch builds the extension ``name``."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return Path(root) / name
    version, cuda = sys.version_info, torch.version.cuda
    device = "cpu" if cuda is None else f"cu{cuda.replace('.', '')}"
    return Path(get_default_build_root()) / f"py{version.major}{version.minor}{sys.abiflags}_{device}" / name


def check_lock(folder: Path, *, grace: float = _LOCK_GRACE) -> bool:
    """Whether another process is building in ``folder``.

    Raises:
        ConfigurationError: There is a lock, and no process of this machine has it.
    """
    lock = folder / _LOCK
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    if age < grace or _is_held(lock):
        return True
    raise ConfigurationError(
        f"a build that was killed {age / 60:.0f} minutes ago has left its lock, for which DeepSpeed would wait without "
        "end. No process of this machine holds it.",
        where=str(lock),
        fix=f"Unless another machine is building in this folder just now, delete it: rm {lock}",
    )


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, as its builder does; unknown counts as held."""
    if not Path("/proc/self/fd").is_dir():
        return True
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.path.samefile(descriptor, lock) for descriptor in descriptors.iterdir()):
                return True
        except OSError:
            # The process has ended, or is another user's.
            continue
    return False


def _load(builder: Any, op: Op) -> None:
    name, folder = str(builder.name), build_directory(str(builder.name))
    built = (folder / f"{name}.so").is_file()
    _wait_for_others(folder, op)
    if not built and not (folder / f"{name}.so").is_file():
        _check_tools(builder, op)
        rank_zero_info(f"DeepSpeed: compiling {name} ({op.purpose}). Once per machine; it takes a minute or more.")
    started = time.monotonic()
    try:
        with _own_ninja():
            builder.load(verbose=False)
    # What the builders and torch raise has no common class of its own; each is a kind of one of these.
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise _failed(name, op, error) from error
    if not built:
        rank_zero_info(f"DeepSpeed: {name} is ready after {time.monotonic() - started:.0f} s, in {folder}.")


@contextmanager
def _own_ninja() -> Iterator[None]:
    """While active, the ninja of this environment is found first, also where the environment is not activated.

    Versions of ninja number commands differently: two that take turns would compile everything anew each time.
    """
    path = os.environ.get("PATH", "")
    own = importlib.util.find_spec("ninja")
    if own is not None:
        os.environ["PATH"] = os.pathsep.join([str(import_module("ninja").BIN_DIR), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path


def _wait_for_others(folder: Path, op: Op) -> None:
    said = False
    while check_lock(folder):
        if not said:
            rank_zero_info(f"DeepSpeed: waiting for another process to compile {folder.name} ({op.purpose}).")
            said = True
        time.sleep(0.2)


def _check_tools(builder: Any, op: Op) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise _missing(f"a C++ compiler ({compiler})", op, "Install one (`apt install g++`), or name yours by CXX.")
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        raise _missing("ninja", op, "Install it with `pip install ninja`.")
    if op is _ASYNC_IO and not builder.is_compatible(verbose=False):
        raise _missing(
            "libaio with its headers", op, 'Install it (`apt install libaio-dev`), or use offload_optimizer="cpu".'
        )


def _missing(what: str, op: Op, fix: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is missing, which DeepSpeed needs for {op.purpose}.", where="DeepSpeed", fix=fix)


def _failed(name: str, op: Op, error: Exception) -> ConfigurationError:
    text = str(error).strip()
    if "CUDA_HOME" in text or "CUDA" in type(error).__name__.upper():
        fitting = f"a CUDA toolkit that fits torch (CUDA {torch.version.cuda})"
        return _missing(fitting, op, f"Install it and set CUDA_HOME to it. DeepSpeed says: {text or repr(error)}")
    return ConfigurationError(
        f"{name} ({op.purpose}) cannot be compiled: {text[-1500:]}",
        where=str(build_directory(name)),
        fix="Correct what the compiler complains about, then delete this folder and start again.",
    )
