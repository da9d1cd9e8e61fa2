"""Tokenised data sets: made once, kept on disk, read by every rank.

The cache entry is named by everything that decides its content (the bytes of the source, the tokenizer, the options)
and appears by one rename, so that ranks and runs that race for it cannot see a half-written one.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedTokenizerBase

from lightning_swift.data.collate import IGNORED
from lightning_swift.data.limits import require_option
from lightning_swift.data.sources import Record, content_hash, read_records
from lightning_swift.data.targets import Encoder, Tokens
from lightning_swift.data.tokenizer import tokenizer_fingerprint
from lightning_swift.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Statistics", "Tokenization", "TokenizedData"]

# Raise it whenever the same input would give other tokens or labels.
_CACHE_VERSION = 1
_ROWS_PER_CHUNK = 1000


@dataclass(frozen=True)
class Tokenization:
    """The options that decide what becomes of a record.

    Attributes:
        max_length: Longest record in tokens.
        loss_on: ``assistant`` (also: completions and plain text) or ``all`` tokens.
        too_long: What to do with a longer record: stop, leave it out, or cut it.
        max_masked: Largest share of records without a single target that is accepted.
        prompts_only: Encode what precedes the answer, for prediction; nothing is a target then.
        ignore_columns: Fields of records that are not used.

    Raises:
        ConfigurationError: A value that is not allowed.
    """

    max_length: int
    loss_on: Literal["assistant", "all"] = "assistant"
    too_long: Literal["error", "drop", "truncate"] = "error"
    max_masked: float = 0.1
    prompts_only: bool = False
    ignore_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_option(
            self.max_length >= 2, "max_length", self.max_length, "2 or more: nothing predicts the first token"
        )
        require_option(self.loss_on in ("assistant", "all"), "loss_on", self.loss_on, '"assistant" or "all"')
        policies = ("error", "drop", "truncate")
        require_option(self.too_long in policies, "too_long", self.too_long, '"error", "drop" or "truncate"')
        require_option(0 <= self.max_masked < 1, "max_masked", self.max_masked, "a share from 0 to below 1")


@dataclass(frozen=True)
class Statistics:
    """What was read and what became of it.

    Attributes:
        records: Records read.
        kept: Records in the data set.
        dropped: Records left out for their length.
        truncated: Records cut to ``max_length``.
        masked: Records left out because no token of theirs is a target (an average over none would be NaN).
        tokens: Tokens of the kept records.
        targets: Target tokens of the kept records.
        longest: Length of the longest record read, in tokens, before cutting.
        largest_id: Largest token id of the kept records.
    """

    records: int = 0
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    masked: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    largest_id: int = -1

    def __str__(self) -> str:
        parts = [f"{self.kept} of {self.records} records, {self.tokens} tokens, {self.targets} of them targets"]
        parts += [f"{self.dropped} too long and dropped"] if self.dropped else []
        parts += [f"{self.truncated} truncated"] if self.truncated else []
        parts += [f"{self.masked} without a target and left out"] if self.masked else []
        return ", ".join(parts)


@dataclass(frozen=True)
class TokenizedData:
    """A tokenised data set in columns ``input_ids`` and ``labels`` (int32), memory-mapped."""

    dataset: Dataset
    statistics: Statistics

    @classmethod
    def make(
        cls,
        source: Path,
        tokenizer: PreTrainedTokenizerBase,
        options: Tokenization,
        *,
        split: str = "train",
        cache_dir: Path | None = None,
    ) -> TokenizedData:
        """Read ``source`` through the cache.

        Raises:
            DataError: If a record is wrong (file and line are named), or if none is left, or too few have targets.
        """
        entry = (cache_dir or _default_cache()) / _key(source, tokenizer, options, split)
        if not entry.exists():
            _build(entry, source, Encoder(tokenizer, options.loss_on == "all"), options, split)
        return cls._open(entry, source, options)

    @classmethod
    def _open(cls, entry: Path, source: Path, options: Tokenization) -> TokenizedData:
        from datasets import Dataset

        statistics = Statistics(**json.loads((entry / "statistics.json").read_text()))
        _refuse_empty(statistics, source, options)
        return cls(Dataset.from_file(str(entry / "data.arrow")).with_format("numpy"), statistics)


def _default_cache() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "lightning_swift"


def _key(source: Path, tokenizer: PreTrainedTokenizerBase, options: Tokenization, split: str) -> str:
    # The bound on masked records is checked at every opening; it does not decide the content.
    described = {**asdict(options), "max_masked": None, "split": split, "version": _CACHE_VERSION}
    parts = [json.dumps(described, sort_keys=True), content_hash(source), tokenizer_fingerprint(tokenizer)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _build(entry: Path, source: Path, encoder: Encoder, options: Tokenization, split: str) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    records = read_records(source, split=split, ignore_columns=options.ignore_columns)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=f".{entry.name}-") as scratch:
        made = Path(scratch) / "entry"
        made.mkdir()
        statistics = _write(made / "data.arrow", records, encoder, options)
        (made / "statistics.json").write_text(json.dumps(asdict(statistics)))
        try:
            made.rename(entry)
        except OSError:
            # Another rank or run was faster; its entry has the same name, so it has the same content.
            if not entry.exists():
                raise


def _write(path: Path, records: Iterator[Record], encoder: Encoder, options: Tokenization) -> Statistics:
    import pyarrow as pa

    column = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", column), ("labels", column)])
    tally = _Tally(options)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        chunk: list[dict[str, list[int]]] = []
        for record in records:
            tokens = encoder.encode_prompt(record) if options.prompts_only else encoder.encode(record)
            if (kept := tally.take(record.where, tokens)) is not None:
                labels = [i if target else IGNORED for i, target in zip(kept.ids, kept.targets, strict=True)]
                chunk.append({"input_ids": kept.ids, "labels": labels})
            if len(chunk) == _ROWS_PER_CHUNK:
                writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema=schema))
                chunk = []
        writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema=schema))
    return tally.statistics


class _Tally:
    """Applies the policies record by record and counts what they did."""

    def __init__(self, options: Tokenization) -> None:
        self.options = options
        self.statistics = Statistics()

    def take(self, where: str, tokens: Tokens) -> Tokens | None:
        """``tokens`` as they enter the data set, or None if they do not."""
        seen = self.statistics
        length = len(tokens.ids)
        self.statistics = seen = replace(seen, records=seen.records + 1, longest=max(seen.longest, length))
        if length > self.options.max_length:
            if self.options.too_long == "error":
                raise _too_long(where, length, self.options.max_length)
            if self.options.too_long == "drop":
                self.statistics = replace(seen, dropped=seen.dropped + 1)
                return None
            tokens = self._cut(tokens)
            seen = replace(seen, truncated=seen.truncated + 1)
        targets = sum(tokens.targets)
        if not tokens.ids or not (targets or self.options.prompts_only):
            self.statistics = replace(seen, masked=seen.masked + 1)
            return None
        self.statistics = replace(
            seen,
            kept=seen.kept + 1,
            tokens=seen.tokens + len(tokens.ids),
            targets=seen.targets + targets,
            largest_id=max(seen.largest_id, *tokens.ids),
        )
        return tokens

    def _cut(self, tokens: Tokens) -> Tokens:
        # A prompt is continued at its end, so its start goes; elsewhere the end goes.
        length = self.options.max_length
        kept = slice(-length, None) if self.options.prompts_only else slice(0, length)
        return Tokens(tokens.ids[kept], tokens.targets[kept])


def _too_long(where: str, length: int, max_length: int) -> DataError:
    return DataError(
        f"This record has {length} tokens and max_length is {max_length}.",
        where=where,
        fix='Raise max_length, or set too_long="drop" or too_long="truncate".',
    )


def _refuse_empty(statistics: Statistics, source: Path, options: Tokenization) -> None:
    if statistics.records == 0:
        raise DataError("There is no record in it.", where=str(source), fix="Give a file or folder with records.")
    masked = statistics.masked / statistics.records
    if masked > options.max_masked or statistics.masked == statistics.records:
        raise DataError(
            f"{statistics.masked} of {statistics.records} records have no target token, {masked:.0%}; "
            f"max_masked allows {options.max_masked:.0%}.",
            where=str(source),
            fix='Are there "assistant" messages, and does max_length leave room for the answers? '
            'loss_on="all" counts every token; max_masked accepts more such records.',
        )
    if statistics.kept == 0:
        raise DataError(
            f"No record is left: {statistics}. The longest has {statistics.longest} tokens.",
            where=str(source),
            fix=f"Raise max_length (now {options.max_length}).",
        )
