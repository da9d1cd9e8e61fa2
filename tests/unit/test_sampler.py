"""One order for every number of ranks, and a position in samples."""

from __future__ import annotations

import itertools

import pytest

from lightning_swift.data.sampler import DataOrder, Position, ResumableSampler, TrainingStream

RECORDS = 23


class Counter:
    """What Lightning's counter of trained batches is in a run."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self) -> int:
        return self.batches


def sampler(
    ranks: int,
    rank: int,
    batch: int,
    *,
    start: Position | None = None,
    counter: Counter | None = None,
    counted: int = 0,
) -> ResumableSampler:
    stream = TrainingStream(DataOrder(RECORDS), ranks * batch, start=start or Position(), trained=counter or Counter())
    return ResumableSampler(range(RECORDS), stream, num_replicas=ranks, rank=rank, counted_before=counted)


def epoch_of(ranks: int, batch: int, start: Position | None = None) -> list[int]:
    """All ranks' indices in the order of global batches."""
    shares = [list(sampler(ranks, rank, batch, start=start)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    pieces = [[share[at : at + batch] for at in range(0, len(share), batch)] for share in shares]
    return [index for step in zip(*pieces, strict=True) for piece in step for index in piece]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (1, 4), (2, 2), (4, 1), (3, 5), (2, 11)])
def test_every_split_reads_the_same_order(ranks: int, batch: int) -> None:
    order = DataOrder(RECORDS).epoch(0)
    assert epoch_of(ranks, batch) == order[: RECORDS // (ranks * batch) * ranks * batch]


def test_a_position_continues_on_any_number_of_ranks() -> None:
    order = DataOrder(RECORDS).epoch(3)
    for ranks, batch in ((1, 2), (2, 2), (3, 1)):
        rest = order[5:]
        whole = len(rest) // (ranks * batch) * ranks * batch
        assert epoch_of(ranks, batch, Position(3, 5, 74)) == rest[:whole]


def test_orders_differ_by_epoch_and_by_seed_and_repeat_exactly() -> None:
    orders = [DataOrder(100, seed).epoch(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert DataOrder(100, 1).epoch(1) == orders[3]
    # A changed order would silently break the resumption of existing checkpoints.
    assert DataOrder(10).epoch(0) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


def test_only_what_was_trained_on_moves_the_position() -> None:
    counter = Counter()
    one = sampler(1, 0, 4, counter=counter)
    first = list(itertools.islice(iter(one), 12))
    assert one.stream.position() == Position(0, 0, 0)
    assert list(itertools.islice(iter(one), 12)) == first
    counter.batches = 2
    assert one.stream.position() == Position(0, 8, 8)
    assert not one.stream.exhausted()
    counter.batches = 5
    assert one.stream.exhausted()


def test_a_new_pass_after_training_is_the_next_epoch_whatever_set_epoch_says() -> None:
    counter = Counter()
    one = sampler(1, 0, 4, counter=counter)
    one.set_epoch(7)
    assert list(one) == DataOrder(RECORDS).epoch(0)[:20]
    counter.batches = 5
    one.set_epoch(7)
    assert list(one) == DataOrder(RECORDS).epoch(1)[:20]
    assert one.stream.position() == Position(1, 0, 20)


def test_a_resumed_pass_has_the_length_that_lightning_counts_to() -> None:
    counter = Counter()
    resumed = sampler(1, 0, 4, start=Position(0, 8, 8), counter=counter, counted=2)
    assert len(resumed) == 20
    assert len(list(resumed)) == 12
    counter.batches = 3
    assert len(list(resumed)) == len(resumed) == 20


def test_a_position_without_a_whole_batch_left_is_the_next_epoch() -> None:
    assert sampler(2, 0, 3, start=Position(4, 20, 112)).stream.position() == Position(5, 0, 112)
