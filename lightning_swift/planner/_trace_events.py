"""Counts the storages that PyTorch creates and frees while code runs, fake or real, and what the peak was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from typing_extensions import override

__all__ = ["StorageEvents"]

# As the CUDA caching allocator rounds.
_ROUND = 512


def _rounded(nbytes: int) -> int:
    return (nbytes + _ROUND - 1) // _ROUND * _ROUND


def _storages(tensor: Any) -> Iterator[Any]:
    """The storages behind a tensor, which may be a distributed one. torch's own function imports FSDP for this."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            yield from _storages(part) if isinstance(part, torch.Tensor) else ()
    else:
        yield tensor.untyped_storage()


class StorageEvents(TorchDispatchMode):
    """Every storage that an operator returns is counted until Python frees it.

    Attributes:
        current: Bytes alive.
        peak: Largest ``current`` since the last :meth:`section`.
        sections: Peak of each section since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.sections: dict[str, int] = {}
        self._name = "before"
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._resize = torch.UntypedStorage.resize_

    def section(self, name: str) -> None:
        """The peak of what follows is that of ``name`` (the larger one if it comes again)."""
        self._close()
        self._name = name
        self.peak = self.current

    def restart(self) -> None:
        """Forget all sections."""
        self.sections.clear()
        self._name, self.peak = "before", self.current

    def finish(self) -> dict[str, int]:
        """Close the last section; peaks by section."""
        self._close()
        return dict(self.sections)

    def count(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors that were there before, such as parameters."""
        for tensor in tensors:
            if tensor is not None:
                for storage in _storages(tensor):
                    self._see(storage)

    def _close(self) -> None:
        self.sections[self._name] = max(self.sections.get(self._name, 0), self.peak)

    def _see(self, storage: Any) -> None:
        key, size = id(storage), _rounded(storage.nbytes())
        known = self._alive.get(key)
        if known is not None and known[0]() is storage:
            self._change(size - known[1])
            self._alive[key] = (known[0], size)
            return

        def freed(reference: weakref.ref[Any], key: int = key) -> None:
            held = self._alive.get(key)
            if held is not None and held[0] is reference:
                del self._alive[key]
                self.current -= held[1]

        self._alive[key] = (weakref.ref(storage, freed), size)
        self._change(size)

    def _change(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    @override
    def __enter__(self) -> StorageEvents:
        events = self

        def resize(storage: Any, size: int) -> Any:
            result = events._resize(storage, size)
            if id(storage) in events._alive:
                events._see(storage)
            return result

        # FSDP frees gathered weights by resizing their storage, which no operator sees; put back on leaving.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    @override
    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            # What is made on the meta device (a fake tensor says another) takes no memory.
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                for storage in _storages(leaf):
                    self._see(storage)
        return out
