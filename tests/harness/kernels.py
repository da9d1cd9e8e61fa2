"""DeepSpeed's kernels for the tests that need them, compiled while others run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.harness import ranks as harness

# Seconds: a machine that has never run DeepSpeed compiles for two minutes, a busy one for much longer.
DEADLINE = 1800.0


def wait_for_kernels() -> None:
    """Return when those of ZeRO on CPUs are there, which whoever comes first compiles."""
    harness.run_ranks(_compile, 1, ("cpu",), deadline=DEADLINE)


def _compile(offload: str) -> None:
    from lightning_swift.strategies._zero_engine import choose_accelerator
    from lightning_swift.strategies._zero_ops import ops_for, prepare_ops

    choose_accelerator("cpu")
    prepare_ops(ops_for(device_type="cpu", offload=offload))


def _compile_all() -> None:
    from lightning_swift.errors import ConfigurationError

    try:
        _compile("nvme")
    except ConfigurationError:
        # The test that needs what cannot be compiled says why.
        return


@contextmanager
def background_build() -> Iterator[None]:
    """Compile what this machine lacks in a process of its own; whoever needs a kernel waits for it at its lock.

    Leaving waits for the end: a build that is killed leaves its lock behind.
    """
    process = harness._context.Process(target=_compile_all)
    process.start()
    try:
        yield
    finally:
        process.join()
