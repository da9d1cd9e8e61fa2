"""``@ranks(n)``: run the body of a test in n gloo processes and report what each of them raised.

The processes are forked from a server that has loaded already what they need (``preload.py``), so a test costs a tenth
of a second instead of several. They meet through a file, not a port, so tests cannot collide. Each rank has one thread.
The environment is that of ``torchrun``, so a Trainer in the body starts no processes of its own.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Seconds a test body may take: eight ranks on two cores need 30. A slow or busy machine may stretch it further.
DEADLINE = float(os.environ.get("LIGHTNING_SWIFT_TEST_DEADLINE", "120"))
# Tests that run at the same time take the cores from one another.
_AT_ONCE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Half of it, so that a rank that waits for one that hangs says where before both are ended.
COLLECTIVE_TIMEOUT = timedelta(seconds=DEADLINE * _AT_ONCE / 2)

_PRELOAD = ["tests.harness.preload"]
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung; the text has each rank's traceback."""


def ranks(n: int, *, deadline: float = DEADLINE, env: dict[str, str] | None = None) -> Callable[..., Any]:
    """Run the decorated test in ``n`` processes.

    The test must be a module-level function. It receives its own arguments (parameters and fixtures, which must
    pickle) in every rank; ``torch.distributed`` is initialised with gloo when the body starts. A value returned by
    rank 0 is the value of the call.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return run_ranks(function, n, args, kwargs, deadline=deadline, env=env or {})

        return run

    return decorate


def run_ranks(
    function: Callable[..., Any],
    n: int,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    deadline: float = DEADLINE,
    env: dict[str, str] | None = None,
) -> Any:
    """Call ``function`` in ``n`` ranks; return rank 0's result or raise :class:`RanksFailed`.

    ``deadline`` is in seconds of a machine that does nothing else.
    """
    deadline *= _AT_ONCE
    with tempfile.TemporaryDirectory(prefix="swift-ranks-") as folder:
        workers = []
        for rank in range(n):
            receiver, sender = _context.Pipe(duplex=False)
            job = (function.__module__, function.__qualname__, args, kwargs or {}, rank, n, folder, dict(env or {}))
            process = _context.Process(target=_work, args=(sender, *job), daemon=True)
            process.start()
            sender.close()
            workers.append((process, receiver))
        reports = _collect(workers, time.monotonic() + deadline, deadline)
    if any(error is not None for error, _ in reports):
        raise RanksFailed("\n".join(f"--- rank {r} ---\n{error or 'ok'}" for r, (error, _) in enumerate(reports)))
    return reports[0][1]


def _collect(workers: list[tuple[Any, Connection]], end: float, deadline: float) -> list[tuple[str | None, Any]]:
    reports: list[tuple[str | None, Any] | None] = [None] * len(workers)
    pending = {receiver: rank for rank, (_, receiver) in enumerate(workers)}
    while pending and time.monotonic() < end:
        for receiver in wait(list(pending), timeout=max(0.0, end - time.monotonic())):
            rank = pending.pop(receiver)  # type: ignore[call-overload]
            try:
                reports[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                workers[rank][0].join(5)
                reports[rank] = (f"died without a report (exit code {workers[rank][0].exitcode})", None)
            if reports[rank][0] is not None:  # type: ignore[index]
                # The peers of a failed rank wait in a collective: give them a moment to say so, then end them.
                end = min(end, time.monotonic() + 3 * _AT_ONCE)
    for process, _ in workers:
        process.join(0.5 if not pending else 0)
        if process.is_alive():
            process.kill()
            process.join()
    return [report or (f"timed out after {deadline:.0f} s and was killed", None) for report in reports]


def _work(
    sender: Connection,
    module: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    n: int,
    folder: str,
    env: dict[str, str],
) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29400",
            "TORCHELASTIC_RUN_ID": "tests",
            "OMP_NUM_THREADS": "1",
            **env,
        }
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where a rank that hangs is, into what the test has captured.
    faulthandler.dump_traceback_later(COLLECTIVE_TIMEOUT.total_seconds(), file=sys.__stderr__)
    try:
        result = _run_body(module, name, args, kwargs, rank, n, folder)
        sender.send((None, result))
    except BaseException:  # noqa: BLE001  # torch's CheckpointException and pytest's outcomes are BaseExceptions
        sender.send((traceback.format_exc(), None))
    finally:
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip interpreter shut-down: gloo's threads may still wait for a peer that has failed.
        os._exit(0)


def _run_body(
    module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int, n: int, folder: str
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(Path(folder) / "store"), n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=COLLECTIVE_TIMEOUT)
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    result = getattr(function, "__wrapped__", function)(*args, **kwargs)
    dist.barrier()
    dist.destroy_process_group()
    return result
