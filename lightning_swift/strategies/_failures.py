"""Ends all ranks soon after one has failed, and tells each of them the first cause.

A rank that has raised leaves its peers waiting in a collective that it will never join: for half an hour by default,
after which they report that collective and not the cause. Here the rank leaves its error in the store through which
the ranks have found each other. A thread of every rank looks there; a rank that does not end by itself is ended.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import count
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

__all__ = ["FailureWatch"]

_log = logging.getLogger(__name__)
_KEY = "failure"
_watches = count()


class FailureWatch:
    """Watches the other ranks from its start until it is stopped; as a context it reports what is raised within.

    Every rank makes the same watches in the same order.

    Args:
        label: What this rank is, for the message: ``"rank 3 (pipeline rank 1)"``.

    Attributes:
        interval: Seconds between two looks. Thousands of ranks ask one store, and a failure seen two seconds late has
            cost nothing.
        grace: Seconds from another rank's failure to the end of this process, in which it may see by itself that its
            peer is gone and unwind as usual.
    """

    interval = 2.0
    grace = 15.0

    def __init__(self, label: str) -> None:
        self.label = label
        self._store = PrefixStore(f"lightning_swift/watch/{next(_watches)}", _get_default_store())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning-swift-failures", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.report(error)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks of this rank's failure, unless one has failed before; log which was the first."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        mine = f"{self.label}: {type(error).__name__}: {error}"
        first = self._tell(mine)
        others = "The other ranks are told." if first == mine else f"The first failure was on {first}"
        _log.error("%s. %s", mine, others)

    def _tell(self, mine: str) -> str:
        try:
            first: str = self._store.compare_set(_KEY, "", mine).decode()
        except dist.DistError:
            # The rank that kept the store is gone.
            return mine
        return first

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval):
            first = self._look()
            if first is not None:
                self._end(first)
                return

    def _look(self) -> str | None:
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except dist.DistError:
            return "the rank that keeps the store is gone"

    def _end(self, first: str) -> None:
        if self._stopped.wait(self.grace):
            return
        _log.error("%s is ended, because another rank has failed: %s", self.label, first)
        # The main thread waits inside a collective, where no exception of Python reaches it.
        os._exit(1)
