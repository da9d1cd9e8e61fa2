"""Records of different lengths as one batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["IGNORED", "PadBatch"]

IGNORED = -100
"""The label that cross-entropy leaves out (torch's and Hugging Face's default)."""


@dataclass(frozen=True)
class PadBatch:
    """Pads to the longest record of the batch; what is padding is known by length, never by token id.

    Args:
        pad_id: Token that fills; it may equal the end-of-sequence token, whose own positions stay targets.
        multiple_of: Lengths are rounded up to a multiple of this (tensor cores, sequence parallelism).
        side: ``right`` for training, ``left`` for prompts that are to be continued.
        with_labels: False leaves the labels out.
    """

    pad_id: int
    multiple_of: int = 1
    side: Literal["left", "right"] = "right"
    with_labels: bool = True

    def __call__(self, records: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Batch ``records``.

        Args:
            records: ``input_ids`` and ``labels`` of each record, of the same length.

        Returns:
            ``input_ids``, ``attention_mask`` and ``labels``: int64 of shape ``[batch, length]``.
        """
        longest = max(len(record["input_ids"]) for record in records)
        length = -(-longest // self.multiple_of) * self.multiple_of
        shape = (len(records), length)
        batch = {"input_ids": torch.full(shape, self.pad_id), "attention_mask": torch.zeros(shape, dtype=torch.int64)}
        if self.with_labels:
            batch["labels"] = torch.full(shape, IGNORED)
        for row, record in enumerate(records):
            size = len(record["input_ids"])
            at = slice(0, size) if self.side == "right" else slice(length - size, length)
            batch["attention_mask"][row, at] = 1
            for name in batch.keys() - {"attention_mask"}:
                batch[name][row, at] = torch.from_numpy(np.asarray(record[name], dtype=np.int64))
        return batch
