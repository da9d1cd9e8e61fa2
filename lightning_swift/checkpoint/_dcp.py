"""torch.distributed.checkpoint made durable and safe, through the hooks it has.

The writer syncs and hashes each file while it is written and puts no path of the machine into ``.metadata``; the
reader takes metadata that was unpickled by the allow-list; the planner reads byte entries as safe types only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_swift.checkpoint.commit import POINT_MIDDLE_OF_DATA
from lightning_swift.checkpoint.faults import faultpoint
from lightning_swift.checkpoint.layout import METADATA, FileRecord, contained
from lightning_swift.checkpoint.together import disk_full
from lightning_swift.errors import UnsafeCheckpointError

__all__ = ["SafeLoadPlanner", "SafeReader", "SyncedWriter"]


class _HashingFile(io.BufferedWriter):
    """A file that hashes what is written to it; for writers that never seek, as torch's do."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()
        self.size = 0
        # torch's archive writer turns what a write raises into "unexpected pos" of its own.
        self.failure: OSError | None = None

    @override
    def write(self, data: Any) -> int:
        try:
            if self.size > 0:
                faultpoint(POINT_MIDDLE_OF_DATA)
            written = super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return written

    @override
    def close(self) -> None:
        # torch closes the stream itself, so this is the last moment at which the file can be synced.
        try:
            if not self.closed and self.failure is None:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()


class _SyncedFileSystem(FileSystem):
    """Local files, hashed as they are written and synced before they are closed."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with _HashingFile(Path(path)) as file:
                yield file
        except RuntimeError as error:
            if file.failure is None:
                raise
            raise file.failure from error
        self.records[Path(path).name] = FileRecord(size=file.size, sha256=file.digest.hexdigest())

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class SyncedWriter(FileSystemWriter):
    """Writes this rank's shards; afterwards ``records`` has size and hash of every file it wrote."""

    def __init__(self, directory: Path) -> None:
        # Syncing is left to the file system: torch syncs before Python's buffer has been flushed.
        super().__init__(directory, sync_files=False, overwrite=False)
        self.fs = _SyncedFileSystem()
        self.records = self.fs.records

    @override
    def storage_meta(self) -> StorageMeta:
        # torch would store the absolute path of the temporary directory.
        return StorageMeta()

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise disk_full(error, Path(self.path), need=_plan_bytes(plan)) from error
            raise


def _plan_bytes(plan: SavePlan) -> int:
    return sum(
        math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        for item in plan.items
        if item.tensor_data is not None
    )


class SafeReader(FileSystemReader):
    """Reads from files inside one directory, by metadata that has been unpickled safely already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self.directory = directory
        self.metadata = metadata

    @override
    def read_metadata(self) -> Metadata:
        return self.metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            contained(self.directory, self.storage_data[item.storage_index].relative_path)
        return super().read_data(plan, planner)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads flat state; values that are not tensors are read with ``weights_only=True``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"the value of {name} holds a type that is not on torch's list of safe types; nothing was run.",
                where=f"{METADATA} and the files it names",
                fix="If you trust it, allow the type with torch.serialization.add_safe_globals.",
            ) from error
