"""The order of training samples: the same whatever the number of ranks, and resumable at any sample.

An epoch is one permutation of all records, drawn from ``(seed, epoch)``. Global batch ``j`` is the ``j``-th run of
``ranks x batch_size`` records of it and rank ``r`` takes the ``r``-th piece, so the position in the data is one number
of global samples that another number of ranks, or another batch size, continues from exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

__all__ = ["DataOrder", "Position", "ResumableLoader", "ResumableSampler", "TrainingStream"]


@dataclass(frozen=True)
class Position:
    """A place in the endless sequence of epochs, in global samples.

    Attributes:
        epoch: Which permutation of the records is being read.
        offset: Samples of this epoch that have been trained on, by all data-parallel ranks together.
        samples_seen: Samples trained on since the first step of the run.
    """

    epoch: int = 0
    offset: int = 0
    samples_seen: int = 0


@dataclass(frozen=True)
class DataOrder:
    """What decides the order of samples; a resumed run must have the same.

    Attributes:
        records: Number of records in the data set.
        seed: Seed of the permutations.
        shuffle: False reads the records in file order in every epoch.
    """

    records: int
    seed: int = 0
    shuffle: bool = True

    def epoch(self, epoch: int) -> list[int]:
        """The record indices of ``epoch`` in the order in which they are trained on."""
        if not self.shuffle:
            return list(range(self.records))
        # Seeding with the pair keeps (seed 0, epoch 1) apart from (seed 1, epoch 0).
        order: list[int] = np.random.default_rng((self.seed, epoch)).permutation(self.records).tolist()
        return order


class TrainingStream:
    """Where training stands in the data, derived from the number of batches trained and never from batches drawn.

    Workers and Lightning draw batches ahead and may restart a pass without training on it; neither moves the position.

    Args:
        order: The order of samples.
        global_batch: Samples that all data-parallel ranks take together for one batch.
        start: Where the first pass begins.
        trained: Returns a counter that rises by one with every batch trained on by this rank.
    """

    def __init__(self, order: DataOrder, global_batch: int, *, start: Position, trained: Callable[[], int]) -> None:
        self.order = order
        self.global_batch = global_batch
        self._trained = trained
        self._base = trained()
        self._anchor = self.next_epoch(start) if self._left(start) == 0 else start

    @property
    def epoch_batches(self) -> int:
        """Batches of a whole epoch; the records that do not fill a last global batch are left out of it."""
        return self.order.records // self.global_batch

    @property
    def anchor(self) -> Position:
        """Where the current pass began."""
        return self._anchor

    def position(self) -> Position:
        """The position after the last batch that was trained on."""
        samples = (self._trained() - self._base) * self.global_batch
        anchor = self._anchor
        return Position(anchor.epoch, anchor.offset + samples, anchor.samples_seen + samples)

    def exhausted(self) -> bool:
        """Whether the current epoch has no whole global batch left."""
        return self._left(self.position()) == 0

    def next_epoch(self, position: Position) -> Position:
        """The start of the epoch after that of ``position``."""
        return Position(position.epoch + 1, 0, position.samples_seen)

    def begin_pass(self) -> Position:
        """Where a new pass over the loader begins: the next epoch, or the same place if nothing was trained on."""
        if self._trained() > self._base:
            self._anchor = self.next_epoch(self.position())
            self._base = self._trained()
        return self._anchor

    def batches_left(self) -> int:
        """Batches from the start of the current pass to the end of its epoch."""
        return self._left(self._anchor)

    def _left(self, position: Position) -> int:
        return max(0, self.order.records - position.offset) // self.global_batch


class ResumableSampler(DistributedSampler[Any]):
    """This rank's record indices of the current pass, from the stream's position to the end of the epoch.

    It is a ``DistributedSampler`` so that Lightning keeps it, and it takes no epoch from ``set_epoch``: Lightning's
    epoch counter is ahead of the data after a run that ``max_steps`` ended in the middle of an epoch.

    Args:
        dataset: The data set that is sampled.
        stream: The shared position.
        num_replicas: Number of data-parallel ranks.
        rank: This rank's place among them.
        counted_before: Batches of the current pass that Lightning counts as done already. A resumed pass yields only
            what is left, while its length is compared with a counter that goes on from this number.
    """

    def __init__(
        self, dataset: Sized, stream: TrainingStream, *, num_replicas: int, rank: int, counted_before: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=stream.order.shuffle, drop_last=True)  # type: ignore[arg-type]
        self.stream = stream
        self._batch = stream.global_batch // num_replicas
        self._counted_before = counted_before
        self._first_pass = stream.begin_pass()

    @override
    def __iter__(self) -> Iterator[int]:
        start = self.stream.begin_pass()
        if start != self._first_pass:
            self._counted_before = 0
        order = self.stream.order.epoch(start.epoch)
        first = start.offset + self.rank * self._batch
        for batch in range(self.stream.batches_left()):
            at = first + batch * self.stream.global_batch
            yield from order[at : at + self._batch]

    @override
    def __len__(self) -> int:
        return (self._counted_before + self.stream.batches_left()) * self._batch

    @override
    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the stream knows the epoch from what was trained on."""


class ResumableLoader(DataLoader[Any]):
    """A loader over a :class:`ResumableSampler`; its state is empty, as the data module keeps the position.

    Lightning warns of inexact resumption where a loader has no state.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""
