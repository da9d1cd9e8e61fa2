"""Named points in commit code where a test can kill, stop or slow one rank; a no-op unless it is armed.

A point is armed by ``LIGHTNING_SWIFT_FAULT=POINT:RANK:ACTION`` where ACTION is ``kill`` (SIGKILL of the process),
``raise`` (an :class:`OSError` as a full disk gives it) or ``sleep=SECONDS``.
"""

from __future__ import annotations

import errno
import os
import signal
import time

__all__ = ["FAULT_VARIABLE", "faultpoint"]

FAULT_VARIABLE = "LIGHTNING_SWIFT_FAULT"


def faultpoint(name: str) -> None:
    """Do nothing, unless a test has armed the point ``name`` for this rank.

    Raises:
        OSError: ``ENOSPC``, when the point is armed with ``raise``.
    """
    armed = os.environ.get(FAULT_VARIABLE)
    if armed is None:
        return
    point, rank, action = armed.split(":")
    if point != name or rank != os.environ.get("RANK", "0"):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise OSError(errno.ENOSPC, f"fault injected at {name}")
    elif action.startswith("sleep="):
        time.sleep(float(action.removeprefix("sleep=")))
