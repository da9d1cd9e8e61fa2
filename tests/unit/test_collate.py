"""Padding is known by length, never by token id."""

from __future__ import annotations

import torch

from lightning_swift.data.collate import IGNORED, PadBatch

RECORDS = [
    {"input_ids": [5, 6, 9], "labels": [IGNORED, 6, 9]},
    {"input_ids": [7, 9], "labels": [IGNORED, 9]},
]


def test_a_batch_is_padded_on_the_right() -> None:
    batch = PadBatch(0)(RECORDS)
    assert batch["input_ids"].tolist() == [[5, 6, 9], [7, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 9], [IGNORED, 9, IGNORED]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_an_end_token_that_pads_too_stays_a_target() -> None:
    batch = PadBatch(9)(RECORDS)
    assert batch["input_ids"].tolist() == [[5, 6, 9], [7, 9, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 9], [IGNORED, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_lengths_are_rounded_up() -> None:
    for multiple, length in ((1, 3), (2, 4), (3, 3), (8, 8)):
        assert PadBatch(0, multiple)(RECORDS)["labels"].shape == (2, length)


def test_prompts_are_padded_on_the_left_and_have_no_labels() -> None:
    batch = PadBatch(0, side="left", with_labels=False)(RECORDS)
    assert batch["input_ids"].tolist() == [[5, 6, 9], [0, 7, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert "labels" not in batch
