"""What a pipelined model returns: a loss on all ranks, and logits where they can be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from lightning_swift.errors import ModelError
from lightning_swift.parallel._pipeline_batch import PipelineBatch

__all__ = ["LogitsGatherer", "PipelineOutput"]

_IN_TRAINING = (
    "the logits of a training step stay on the last pipeline stage, and nothing computed from them would be trained.",
    "Use out.loss, give the strategy loss_fn(logits, labels), or take metrics in validation with gather_logits=True.",
)
_NOT_GATHERED = (
    "the logits are on the last pipeline stage only.",
    "Give the strategy gather_logits=True to have them on all ranks in evaluations.",
)


class PipelineOutput(CausalLMOutputWithPast):
    """Output of a Hugging Face model whose ``logits`` say why they are missing."""

    @classmethod
    def training(cls, loss: Tensor) -> PipelineOutput:
        """Of a training step."""
        return cls._made(loss, None, _IN_TRAINING)

    @classmethod
    def evaluation(cls, loss: Tensor | None, logits: Tensor | None = None) -> PipelineOutput:
        """Of an evaluation; either may be missing."""
        return cls._made(loss, logits, _NOT_GATHERED)

    @classmethod
    def _made(cls, loss: Any, logits: Any, reason: tuple[str, str]) -> PipelineOutput:
        output = cls(loss=loss, logits=logits)
        if logits is None:
            output.__dict__["_missing"] = reason
        return output

    @override
    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            missing = object.__getattribute__(self, "__dict__").get("_missing")
            if missing is not None:
                raise ModelError(missing[0], where="out.logits", fix=missing[1])
        return super().__getattribute__(name)


class LogitsGatherer:
    """Gives the logits of the last stage to all ranks of a pipeline."""

    def __init__(self, group: dist.ProcessGroup, last_rank: int) -> None:
        self._group, self._last_rank = group, last_rank
        self._kind: tuple[int, torch.dtype] | None = None

    def gather(self, parts: Sequence[Any], batch: PipelineBatch, *, last: int | None = None) -> Tensor:
        """Logits ``[rows, length, vocabulary]`` without padding, from those of each microbatch on the last stage.

        ``last`` limits them to that many positions at the end.
        """
        length = batch.length if last is None else last
        mine = self._joined(parts, batch, length) if parts else None
        if self._kind is None:
            self._kind = self._agreed_kind(mine)
        if mine is None:
            size, dtype = self._kind
            mine = torch.empty((batch.rows, length, size), dtype=dtype, device=batch.inputs.device)
        dist.broadcast(mine, group=self._group, group_src=self._last_rank)
        return mine

    def _joined(self, parts: Sequence[Any], batch: PipelineBatch, length: int) -> Tensor:
        whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
        return torch.cat([part[:, batch.length - length : batch.length] for part in whole])[: batch.rows].contiguous()

    def _agreed_kind(self, mine: Tensor | None) -> tuple[int, torch.dtype]:
        kind: list[Any] = [None if mine is None else (mine.shape[-1], mine.dtype)]
        dist.broadcast_object_list(kind, group=self._group, group_src=self._last_rank)
        size, dtype = kind[0]
        return size, dtype
