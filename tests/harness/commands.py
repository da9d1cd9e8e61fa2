"""The ``lightning-swift`` command in a process that has loaded its libraries already: five seconds less.

What has to be true of a fresh interpreter (imports, signals while it starts) is tested with a real one.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness.ranks import _context

# Seconds: a run may wait for cores that other tests use.
DEADLINE = 300.0


def start_command(arguments: Sequence[str], folder: Path, *, output: Path, env: dict[str, str] | None = None) -> Any:
    """Start the command in ``folder`` in a session of its own; its two streams become files in ``output``."""
    process = _context.Process(target=_run, args=(list(arguments), str(folder), str(output), env or {}))
    process.start()
    return process


def run_command(
    arguments: Sequence[str], folder: Path, *, output: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; the result is that of ``subprocess.run(..., text=True)``."""
    process = start_command(arguments, folder, output=output, env=env)
    process.join(DEADLINE)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"no end after {DEADLINE} s:\n{(output / 'err').read_text()}")
    texts = [(output / name).read_text() for name in ("out", "err")]
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def _run(arguments: list[str], folder: str, output: str, env: dict[str, str]) -> None:
    os.setsid()
    for descriptor, name in ((1, "out"), (2, "err")):
        opened = os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
    os.environ.update(env)
    os.chdir(folder)
    # As ``python -m`` does, and for children that Lightning starts by the name of their script.
    sys.path.insert(0, "")
    sys.argv = ["lightning-swift", *arguments]
    # Remembered by the server from before the change of the environment.
    tempfile.tempdir = None
    # Only what the command itself registers is run at its end.
    atexit._clear()
    start = _twin(arguments)
    from lightning.pytorch.strategies.launchers import subprocess_script

    subprocess_script.subprocess = SimpleNamespace(Popen=start)  # type: ignore[attr-defined]
    _end(arguments)


def _end(arguments: list[str]) -> None:
    from lightning_swift import cli

    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _twin(arguments: list[str]) -> Callable[..., Any]:
    """A stand-in for ``Popen`` in Lightning's launcher: its process was forked before anything had run."""
    receiver, sender = mp.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        sender.close()
        try:
            environment = receiver.recv()
        except EOFError:
            os._exit(0)
        os.environ.clear()
        os.environ.update(environment)
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        # Lightning reads it from the environment when it is imported.
        rank_zero_only.rank = int(environment["LOCAL_RANK"])
        _end(arguments)
    receiver.close()

    def start(command: Sequence[str], *, env: dict[str, str], cwd: str | None) -> _Child:
        assert list(command[2:]) == arguments
        sender.send(env)
        return _Child(pid)

    return start


class _Child:
    """What Lightning's observer of processes and the end of a command use of ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # The observer's thread was first.
                return self.returncode
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the command of another rank", timeout)
            time.sleep(0.05)
        return int(self.returncode or 0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
