"""Signals for processes that tests start."""

from __future__ import annotations

import signal


def interruptible() -> None:
    """``preexec_fn`` of a process that is to be interrupted: what runs in the background of a shell ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
