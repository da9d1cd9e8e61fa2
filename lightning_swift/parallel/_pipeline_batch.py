"""Prepares a batch for the pipeline: what cannot work is refused, rows and lengths are padded, the rest is cut by rows.

Padding changes no result: added rows and added positions have no labels, and a causal model never looks at what
follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_swift.errors import DataError, ModelError

__all__ = ["IGNORED", "Microbatch", "PipelineBatch", "Whole", "prepare"]

# The label that cross_entropy and transformers leave out.
IGNORED = -100

_LABELS = ("labels", "shift_labels")
# Keyword arguments that are settings of one forward pass and have no rows.
_WITHOUT_ROWS = ("cache_position", "num_items_in_batch")
_REFUSED_VALUES = {
    "past_key_values": "Leave it out: pipeline stages keep no cache.",
    "inputs_embeds": "Pass input_ids: the embedding is on the first stage only.",
    "head_mask": "Leave it out.",
    "encoder_hidden_states": "Only decoder models without cross attention can be split.",
}
_REFUSED_SWITCHES = {
    "use_cache": "Leave it out, or pass use_cache=False: pipeline stages keep no cache.",
    "output_hidden_states": "Leave it out: the hidden states of other stages are not here.",
    "output_attentions": "Leave it out: the attention weights of other stages are not here.",
    "output_router_logits": "Leave it out, also in the model's configuration: the auxiliary loss of the router needs "
    "the logits of all stages.",
    "logits_to_keep": "Leave it out: the loss needs all logits.",
}


class Whole:
    """A value that every microbatch gets as it is; opaque to torch's cutting and to FSDP's casting."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Microbatch:
    """What a stage is given besides its input.

    Attributes:
        arguments: For the model's forward.
        labels: ``[rows, length]``, or None.
        targets: Number of target tokens in this microbatch, ``[1]``.
        tokens: Number of target tokens in the whole batch, a scalar of at least 1.
        wants_logits: Whether the last stage returns logits.
    """

    arguments: dict[str, Any]
    labels: Tensor | None
    targets: Tensor
    tokens: Tensor
    wants_logits: bool

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> Microbatch:
        """Undo :meth:`PipelineBatch.keywords`."""
        values = {name: value.value if isinstance(value, Whole) else value for name, value in keywords.items()}
        own = {name: values.pop(name) for name in ("targets", "tokens", "wants_logits")}
        return cls(arguments=values, labels=values.pop("labels", None), **own)

    def labels_with_target(self) -> Tensor:
        """The labels, or if none is a target one put in, so that a mean over them is a number; its share is 0."""
        assert self.labels is not None
        labels = self.labels.clone()
        labels[0, 1] = torch.where(self.targets[0] > 0, labels[0, 1], 0)
        return labels

    def share(self) -> Tensor:
        """Share of this microbatch in the target tokens of the batch, a scalar."""
        return self.targets[0] / self.tokens


@dataclass(frozen=True)
class PipelineBatch:
    """A batch that divides into microbatches.

    Attributes:
        inputs: Token ids, ``[rows, length]``, padded.
        by_row: Tensors whose first dimension is that of ``inputs``.
        whole: What every microbatch gets as it is.
        targets: Number of target tokens of each microbatch, ``[microbatches]``.
        rows: Rows before padding.
        length: Length before padding.
    """

    inputs: Tensor
    by_row: dict[str, Tensor]
    whole: dict[str, Any]
    targets: Tensor
    rows: int
    length: int

    @property
    def labels(self) -> Tensor | None:
        """Padded labels ``[rows, length]``, None if there are none."""
        return self.by_row.get("labels")

    def keywords(self, *, wants_logits: bool = False) -> dict[str, Any]:
        """Keyword arguments of a schedule's step, which cuts tensors along their first dimension."""
        tokens = self.whole.get("num_items_in_batch")
        if tokens is None:
            tokens = self.targets.sum().clamp(min=1)
        own = {"targets": self.targets, "tokens": Whole(tokens), "wants_logits": Whole(wants_logits)}
        others = {name: Whole(value) for name, value in self.whole.items() if name != "num_items_in_batch"}
        return {**self.by_row, **others, **own}

    def microbatches(self, *, wants_logits: bool = False) -> list[tuple[Tensor, dict[str, Any]]]:
        """Token ids and keywords of each microbatch, as a schedule would cut them."""
        count = len(self.targets)
        cut = {
            name: value.chunk(count) if isinstance(value, Tensor) else (value,) * count
            for name, value in self.keywords(wants_logits=wants_logits).items()
        }
        ids = self.inputs.chunk(count)
        return [(ids[number], {name: parts[number] for name, parts in cut.items()}) for number in range(count)]


def prepare(
    input_ids: Tensor | None, arguments: dict[str, Any], *, microbatches: int, length_multiple: int, config: Any
) -> PipelineBatch:
    """Check and pad a batch.

    Args:
        input_ids: Token ids, ``[rows, length]``.
        arguments: All other arguments of the model's forward.
        microbatches: What the number of rows is made a multiple of, by copies of the last row without labels.
        length_multiple: What the length is made a multiple of, by padding on the right.
        config: The model's configuration.

    Raises:
        DataError: A tensor of the batch that does not fit.
        ModelError: An argument that cannot work on pipeline stages.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    _refuse(given, config)
    ids = _checked_ids(input_ids)
    rows, length = ids.shape
    given.pop("return_dict", None)
    _check_labels(given, rows, length)
    by_row = {name: value for name, value in given.items() if _is_by_row(name, value, rows)}
    whole = {name: value for name, value in given.items() if name not in by_row and name not in _REFUSED_SWITCHES}
    by_row |= _expanded_positions(whole, rows)
    extra = -length % length_multiple
    if extra:
        ids = F.pad(ids, (0, extra))
        by_row = {name: _longer(name, value, length, extra) for name, value in by_row.items()}
        _refuse_unpadded(whole, length)
    more = -rows % microbatches
    if more:
        ids = _more_rows(ids, more)
        by_row = {name: _more_rows(value, more) for name, value in by_row.items()}
        by_row |= {name: _without_labels(by_row[name], rows) for name in _LABELS if name in by_row}
    return PipelineBatch(ids, by_row, whole, _count_targets(by_row, ids, microbatches), rows, length)


def _refuse(given: dict[str, Any], config: Any) -> None:
    for name, fix in _REFUSED_VALUES.items():
        if name in given:
            _refuse_argument(name, given[name], fix)
    for name, fix in _REFUSED_SWITCHES.items():
        switch = given.get(name, False)
        if isinstance(switch, Tensor) or switch:
            _refuse_argument(name, switch, fix)
    if getattr(config, "output_router_logits", False) and "output_router_logits" not in given:
        _refuse_argument("config.output_router_logits", True, _REFUSED_SWITCHES["output_router_logits"])
    if given.get("return_dict", True) is False:
        _refuse_argument("return_dict", False, "Use the fields of the output: out.loss.")
    mask = given.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        _refuse_argument("attention_mask", type(mask).__name__, "Pass a tensor of shape [rows, length].")


def _refuse_argument(name: str, value: Any, fix: str) -> NoReturn:
    shown = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]
    raise ModelError(f"{name}={shown} does not work on pipeline stages.", where="pipelined model", fix=fix)


def _checked_ids(ids: Tensor | None) -> Tensor:
    if ids is None or ids.dim() != 2 or not ids.numel():
        shown = "none" if ids is None else f"shape {list(ids.shape)}"
        raise DataError(
            f"input_ids have {shown}.", where="pipelined model", fix="Pass token ids of shape [rows, length]."
        )
    return ids


def _check_labels(given: dict[str, Any], rows: int, length: int) -> None:
    for name in _LABELS:
        labels = given.get(name)
        if labels is not None and (not isinstance(labels, Tensor) or labels.shape != (rows, length)):
            shown = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise DataError(
                f"{name} have shape {shown}, and input_ids {[rows, length]}.",
                where="pipelined model",
                fix="Give one label for every token, -100 where no loss is wanted.",
            )
        if labels is not None and length < 2:
            raise DataError(
                "sequences of one token leave nothing to predict.",
                where="pipelined model",
                fix="Give sequences of at least 2 tokens.",
            )


def _is_by_row(name: str, value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows and name not in _WITHOUT_ROWS


def _expanded_positions(whole: dict[str, Any], rows: int) -> dict[str, Tensor]:
    """Positions that are given once for all rows, taken out of ``whole``."""
    positions = whole.get("position_ids")
    if positions is None:
        return {}
    if not isinstance(positions, Tensor) or positions.dim() > 2 or (positions.dim() == 2 and len(positions) != 1):
        raise DataError(
            f"position_ids of shape {list(getattr(positions, 'shape', []))} cannot be cut by rows.",
            where="pipelined model",
            fix="Pass position_ids of shape [rows, length].",
        )
    del whole["position_ids"]
    return {"position_ids": positions.expand(rows, positions.shape[-1])}


def _longer(name: str, value: Tensor, length: int, extra: int) -> Tensor:
    if value.dim() == 1 or length not in value.shape[1:]:
        return value
    if value.dim() > 2 and value.shape[1] != length:
        _refuse_length(name, value)
    if value.dim() > 2:
        return F.pad(value.movedim(1, -1), (0, extra)).movedim(-1, 1)
    return F.pad(value, (0, extra), value=IGNORED if name in _LABELS else 0)


def _refuse_unpadded(whole: dict[str, Any], length: int) -> None:
    for name, value in whole.items():
        if isinstance(value, Tensor) and length in value.shape:
            _refuse_length(name, value)


def _refuse_length(name: str, value: Tensor) -> NoReturn:
    raise DataError(
        f"{name} of shape {list(value.shape)} cannot be padded to the length that sequence parallelism needs.",
        where="pipelined model",
        fix="Give batches whose length is a multiple of tensor_parallel_size.",
    )


def _more_rows(value: Tensor, more: int) -> Tensor:
    return torch.cat([value, value[-1:].expand(more, *value.shape[1:])])


def _without_labels(labels: Tensor, rows: int) -> Tensor:
    labels = labels.clone()
    labels[rows:] = IGNORED
    return labels


def _count_targets(by_row: dict[str, Tensor], ids: Tensor, microbatches: int) -> Tensor:
    if "shift_labels" in by_row:
        mask = by_row["shift_labels"] != IGNORED
    elif "labels" in by_row:
        mask = by_row["labels"][:, 1:] != IGNORED
    else:
        return torch.zeros(microbatches, dtype=torch.long, device=ids.device)
    return mask.reshape(microbatches, -1).sum(1)
