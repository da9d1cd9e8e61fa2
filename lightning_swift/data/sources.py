"""Records from JSON Lines, parquet and ``datasets`` folders, each with the place it came from, checked one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_swift.errors import DataError

__all__ = ["Message", "Record", "content_hash", "read_records"]

Message = dict[str, Any]

_FORMATS = (("messages",), ("prompt", "completion"), ("text",))
_EXPECTED = 'A record has "messages", or "prompt" and "completion", or "text".'
_SUFFIXES = {".jsonl", ".ndjson", ".json", ".parquet"}


@dataclass(frozen=True)
class Record:
    """One checked record; exactly one of the three forms is set.

    Attributes:
        where: File and line (JSON Lines, from 1) or row (from 0), for messages.
        messages: A conversation for the chat template.
        prompt: Text before ``completion``.
        completion: Text to be learned after ``prompt``.
        text: Plain text.
    """

    where: str
    messages: list[Message] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None


def read_records(path: Path, *, split: str = "train", ignore_columns: Sequence[str] = ()) -> Iterator[Record]:
    """Read and check the records of a file or folder in order, holding one at a time.

    Args:
        path: A ``.jsonl``/``.ndjson``/``.json`` file with one object per line, a ``.parquet`` file, or a folder written
            by ``datasets``' ``save_to_disk``. Nothing is downloaded and no code of a data set is run.
        split: Which split to take from a folder that holds several.
        ignore_columns: Fields that records may have and that are not used.

    Raises:
        DataError: If a record is not one of the three forms; names the file and the line or row.
    """
    for where, raw in _raw_records(path, split):
        yield _check(where, raw, ignore_columns)


def content_hash(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names."""
    _require(path)
    if path.is_file():
        return _file_hash(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path)}:{_file_hash(file)}\n".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require(path: Path) -> None:
    if not path.exists():
        raise DataError("This file or folder does not exist.", where=str(path), fix="Check the path.")
    if path.is_file() and path.suffix not in _SUFFIXES:
        raise DataError(
            f'Files of type "{path.suffix}" are not read.',
            where=str(path),
            fix="Give JSON Lines (.jsonl), parquet, or a folder written by datasets' save_to_disk.",
        )


def _raw_records(path: Path, split: str) -> Iterator[tuple[str, object]]:
    _require(path)
    if path.is_dir():
        return _folder_rows(path, split)
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                # A byte-order mark is harmless and common in files from other systems.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield where, json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"This line is not UTF-8 ({error.reason}).", where=where, fix="Save as UTF-8."
                ) from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"This line is not JSON ({error.msg} at column {error.colno}).",
                    where=where,
                    fix="Each line must be one whole JSON object.",
                ) from error
            except RecursionError as error:
                raise DataError("This line is nested too deeply.", where=where, fix="Remove the line.") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows))
    except (ArrowInvalid, OSError) as error:
        raise DataError(
            f"This is not a whole parquet file ({error}).", where=str(path), fix="Write it again."
        ) from error


def _folder_rows(path: Path, split: str) -> Iterator[tuple[str, object]]:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as error:
        raise DataError(
            f"This folder cannot be read as a data set ({error}).",
            where=str(path),
            fix="Give a folder written by datasets' save_to_disk, or a JSON Lines or parquet file.",
        ) from error
    if isinstance(data, DatasetDict):
        if split not in data:
            raise DataError(
                f'This folder has the splits {sorted(data)} and no "{split}".',
                where=str(path),
                fix=f"Name one of them, for example {path / min(data)}.",
            )
        data = data[split]
    return ((f"{path}: row {number}", row) for number, row in enumerate(data))


def _check(where: str, raw: object, ignore_columns: Sequence[str]) -> Record:
    if not isinstance(raw, Mapping):
        raise DataError(f"This record is a {type(raw).__name__}, not an object.", where=where, fix=_EXPECTED)
    # Parquet and Arrow give every row all columns and fill the absent ones with None.
    fields = {key: value for key, value in raw.items() if value is not None and key not in ignore_columns}
    form = next((form for form in _FORMATS if set(form) == set(fields)), None)
    if form is None:
        nulls = [key for key, value in raw.items() if value is None and key not in ignore_columns]
        if nulls and not fields:
            raise DataError(f"This record has nothing but null in {_listed(nulls)}.", where=where, fix=_EXPECTED)
        raise DataError(f"This record has {_named(fields)}.", where=where, fix=_advice(fields, nulls))
    if form == ("messages",):
        return Record(where, messages=_messages(where, fields["messages"]))
    for name in form:
        if not isinstance(fields[name], str):
            raise DataError(
                f'"{name}" is a {type(fields[name]).__name__}, not a string.',
                where=where,
                fix="Give conversations as messages." if isinstance(fields[name], list) else "Make it a string.",
            )
        _refuse_surrogates(where, name, fields[name])
    return Record(where, **fields)


def _named(fields: Mapping[str, object]) -> str:
    return f"the fields {_listed(fields)}" if fields else "no fields"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))


def _refuse_surrogates(where: str, name: str, value: object) -> None:
    """Refuse strings with half a surrogate pair: JSON can spell it, but it is no character and has no UTF-8."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            left += part
        elif isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f'"{name}" has {part[error.start]!a}, half of a surrogate pair, which is no character.',
                    where=where,
                    fix="Write the whole character, or remove it.",
                ) from error


def _advice(fields: Mapping[str, object], nulls: Collection[str]) -> str:
    touched = [form for form in _FORMATS if set(form) & set(fields)]
    if len(touched) > 1:
        return f"{_EXPECTED} This one mixes them."
    if touched:
        missing = sorted(set(touched[0]) - set(fields))
        extra = sorted(set(fields) - set(touched[0]))
        if missing:
            return f'{_EXPECTED} "{missing[0]}" is {"null" if missing[0] in nulls else "missing"}.'
        return f"Name unused fields: ignore_columns={extra}."
    return _EXPECTED


def _messages(where: str, raw: object) -> list[Message]:
    if not isinstance(raw, list):
        raise DataError(f'"messages" is a {type(raw).__name__}, not a list.', where=where, fix=_EXPECTED)
    if not raw:
        raise DataError('"messages" is not a list with at least one message.', where=where, fix=_EXPECTED)
    return [_message(f"{where}, message {number}", message) for number, message in enumerate(raw)]


def _message(where: str, raw: object) -> Message:
    if not isinstance(raw, Mapping):
        raise DataError(f"A {type(raw).__name__}, not an object.", where=where, fix='It needs "role" and "content".')
    message = {key: value for key, value in raw.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise DataError('"role" is missing or not a string.', where=where, fix='Such as "user" or "assistant".')
    if not isinstance(message.get("content"), str) and "tool_calls" not in message:
        raise DataError('"content" is missing or not a string.', where=where, fix="Only text is supported.")
    for name, value in message.items():
        _refuse_surrogates(where, str(name), value)
    return message
