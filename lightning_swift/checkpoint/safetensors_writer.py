"""Writes Hugging Face weight files (safetensors, with an index when there are several) from streams of bytes."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lightning_swift.checkpoint.dtypes import ITEM_SIZES, SAFETENSORS_NAMES, Block
from lightning_swift.errors import ConfigurationError, ExportError

__all__ = ["OutputTensor", "Part", "parse_size", "plan_files", "write_weights"]

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?I?B)", re.IGNORECASE)
_UNITS = {"B": 1, **{f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
# Copying is bound by memory, not by arithmetic: more threads would only take more of it.
_THREADS = 4


@dataclass(frozen=True)
class Part:
    """A tensor of the file that is a run of bytes of an :class:`OutputTensor`."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: ``blocks()`` gives its bytes in row-major order, in ``dtype``.

    With ``parts`` the file has these in its place, one after the other in the same bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Block]]
    parts: tuple[Part, ...] = ()

    @property
    def entries(self) -> tuple[Part, ...]:
        """What the header of the file lists."""
        return self.parts or (Part(self.name, self.shape),)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def parse_size(text: str) -> int:
    """Bytes in a size such as ``"5GB"`` (10^9) or ``"500MiB"`` (2^20).

    Raises:
        ConfigurationError: The text is not a positive number with a unit.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match["number"]) * _UNITS[match["unit"].upper()])
    if size < 1:
        raise ConfigurationError(
            f"{text!r} is not a size.", where="max_shard_size", fix='Write a number and a unit, such as "5GB".'
        )
    return size


def plan_files(
    tensors: Sequence[OutputTensor], max_shard_size: int | None, *, stem: str = "model"
) -> dict[str, list[OutputTensor]]:
    """Distribute tensors over files of at most ``max_shard_size`` bytes of data; a larger tensor has its own file."""
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if max_shard_size is not None and groups[-1] and filled + tensor.nbytes > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_weights(
    folder: Path,
    tensors: Sequence[OutputTensor],
    *,
    max_shard_size: int | None = None,
    stem: str = "model",
    metadata: dict[str, str] | None = None,
) -> tuple[str, ...]:
    """Write ``tensors`` to ``folder``, with an index if they need several files.

    Args:
        folder: An existing directory.
        tensors: What to write, in this order over the files.
        max_shard_size: Most bytes of tensor data in one file; None writes a single file.
        stem: Files are called ``STEM.safetensors``, or ``STEM-00001-of-00002.safetensors`` and so on.
        metadata: Further entries of the header; ``format`` is ``pt``.

    Returns:
        Names of the files written.

    Raises:
        ExportError: A dtype that safetensors cannot hold, or a stream of the wrong length.
    """
    for tensor in tensors:
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise ExportError(f"safetensors has no dtype for {tensor.dtype}.", where=tensor.name)
    files = plan_files(tensors, max_shard_size, stem=stem)
    for name, group in files.items():
        _write_file(folder / name, group, {"format": "pt", **(metadata or {})})
    if len(files) == 1:
        return tuple(files)
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": dict(
            sorted((entry.name, name) for name, group in files.items() for tensor in group for entry in tensor.entries)
        ),
    }
    index_name = f"{stem}.safetensors.index.json"
    (folder / index_name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return (*files, index_name)


def _write_file(path: Path, tensors: Sequence[OutputTensor], metadata: dict[str, str]) -> None:
    # Wide elements first, as safetensors itself orders them: every tensor then starts at a multiple of its element.
    ordered = sorted(tensors, key=lambda tensor: -ITEM_SIZES[tensor.dtype])
    header = _header(ordered, metadata)
    starts = accumulate((tensor.nbytes for tensor in ordered), initial=len(header))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, header, 0)
        with ThreadPoolExecutor(max_workers=min(_THREADS, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(_write_tensor, descriptor, *job) for job in zip(starts, ordered, strict=False)]
            wait(jobs, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)
        for job in jobs:
            if not job.cancelled():
                job.result()
    finally:
        os.close(descriptor)


def _write_tensor(descriptor: int, start: int, tensor: OutputTensor) -> None:
    position = start
    for block in tensor.blocks():
        position += _write_all(descriptor, block, position)
    if position - start != tensor.nbytes:
        raise ExportError(f"{position - start} bytes came instead of {tensor.nbytes}.", where=tensor.name)


def _header(tensors: Sequence[OutputTensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for tensor in tensors:
        for entry in tensor.entries:
            end = position + math.prod(entry.shape) * ITEM_SIZES[tensor.dtype]
            header[entry.name] = {
                "dtype": SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(entry.shape),
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_all(descriptor: int, block: Block, position: int) -> int:
    view = memoryview(block).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], position + done)
    return done
