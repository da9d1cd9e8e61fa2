"""Typed errors: each says what is wrong, where, and what to do about it."""

from __future__ import annotations

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "DataError",
    "ExportError",
    "ModelError",
    "SwiftError",
    "UnsafeCheckpointError",
]


class SwiftError(Exception):
    """Root of every error that lightning_swift raises on purpose.

    Args:
        what: One sentence that names the fault and the values involved.
        where: The file, line, option, parameter or rank concerned.
        fix: What the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        text = self.what if self.where is None else f"{self.where}: {self.what}"
        return text if self.fix is None else f"{text} {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments are lost by the default protocol; errors travel between ranks.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[SwiftError], what: str, where: str | None, fix: str | None) -> SwiftError:
    return kind(what, where=where, fix=fix)


class ConfigurationError(SwiftError, ValueError):
    """Options that contradict each other, or a value that is not allowed."""


class DataError(SwiftError, ValueError):
    """A data set that cannot be trained on as it is."""


class ModelError(SwiftError, ValueError):
    """A model that cannot be built, sharded or loaded as asked."""


class CheckpointError(SwiftError, RuntimeError):
    """Root of every error about saving or reading checkpoints."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No whole checkpoint lies at the path named."""

    # FileNotFoundError formats itself from errno and filename; the text above is the better one.
    __str__ = SwiftError.__str__


class CheckpointCorruptError(CheckpointError):
    """A file of the checkpoint is missing, cut, changed or inconsistent with the manifest."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint that would run code or lead outside its own directory if it were read."""


class CheckpointMismatchError(CheckpointError):
    """Tensors of the checkpoint and of the model do not correspond."""


class ExportError(SwiftError, RuntimeError):
    """An export that could not be made, or that does not reproduce the trained model."""
