"""DeepSpeed's kernels for the tests that need them, compiled while others run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.harness import ranks as harness


def _compile() -> None:
    from lightning_swift.errors import ConfigurationError
    from lightning_swift.strategies._zero_engine import choose_accelerator
    from lightning_swift.strategies._zero_ops import ops_for, prepare_ops

    choose_accelerator("cpu")
    for op in ops_for(device_type="cpu", offload="nvme"):
        try:
            prepare_ops([op])
        except ConfigurationError:
            # The test that needs it says what is missing.
            continue


@contextmanager
def background_build() -> Iterator[None]:
    """Compile what this machine lacks in a process of its own; whoever needs a kernel waits for it at its lock.

    Leaving waits for the end: a build that is killed leaves its lock behind.
    """
    process = harness._context.Process(target=_compile)
    process.start()
    try:
        yield
    finally:
        process.join()
