"""The end of a run whose model was refused before it had values."""

from __future__ import annotations

from lightning.pytorch.strategies.parallel import ParallelStrategy
from typing_extensions import override

__all__ = ["LeavesUnread"]


class LeavesUnread(ParallelStrategy):
    """Mixin for a strategy that builds models without values. It goes before the strategy's own base class.

    Lightning moves the module to the CPU at the end, also after an error. A model that was refused for what it is has
    no values to move, and the error about that would take the place of the reason.
    """

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is None or not any(parameter.is_meta for parameter in module.parameters()):
            super().teardown()
            return
        self.model = module
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
