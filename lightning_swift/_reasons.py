"""Says in one sentence why jsonargparse refused something: its own texts list every type of every union on the way."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from textwrap import dedent

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_swift.errors import ConfigurationError, SwiftError

__all__ = ["construction_error", "readable"]

_LONGEST = 600
_LONGEST_VALUE = 60
_UNION = "Does not validate against any of the Union subtypes\n"
_EXPECTED = "Expected a "


def readable(message: str) -> str:
    """``message`` of jsonargparse without the types that were not meant, as one line that ends with a full stop."""
    text = re.sub(r'Parser key "([^"]+)":\s*', r"\1: ", _reason(message))
    text = re.sub(r"<class '([^']+)'>", r"\1", text).replace("NoneType", "None").replace("typing.", "")
    text = " ".join(text.split()).replace(_EXPECTED, "Expected ")
    # The value is quoted at the end and can be a whole section; the reason stands before it.
    return f"{text.rstrip('.')}." if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def construction_error(error: Exception, raised: Sequence[Exception]) -> Exception:
    """What to raise where jsonargparse could not build an object.

    Args:
        error: What jsonargparse has raised; it quotes the errors of constructors instead of passing them on.
        raised: What constructors have raised meanwhile, as far as known.

    Returns:
        The constructor's own error where that is one of ours or of Lightning, which say all there is to say; else a
        ConfigurationError that names the error and its line.
    """
    # A union goes on with its next type after an error: only what is quoted at the end has ended it.
    quoted = [item for item in [*reversed(raised), *_causes(error)] if _first_line(item) in str(error)]
    cause = quoted[0] if quoted else error
    if isinstance(cause, SwiftError | MisconfigurationException):
        return cause
    if cause is error or _is_refusal(cause):
        return ConfigurationError(readable(str(error)))
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return ConfigurationError(
        f"{type(cause).__name__}: {cause}",
        where=f"{frame.filename}:{frame.lineno}",
        fix="(--debug shows the traceback of this constructor.)",
    )


def _is_refusal(error: Exception) -> bool:
    """Whether jsonargparse speaks, and not a constructor."""
    return str(error).startswith((_EXPECTED, _UNION))


def _reason(text: str) -> str:
    head, union, rest = text.partition(_UNION)
    listed, _, given = rest.partition("Errors:\n")[2].rpartition("Given value type:")
    reasons = [_reason(item).strip() for item in re.split(r"^- ", dedent(listed), flags=re.MULTILINE)[1:]]
    if not union or not reasons:
        return text
    others = [reason for reason in reasons if not reason.startswith(_EXPECTED)]
    if others:
        return head + " ".join(others)
    value = given.partition("Given value:")[2].strip()
    got = f". Got value: {value}" if len(value) <= _LONGEST_VALUE else ""
    return f"{head}{_EXPECTED}{' or '.join(reason.removeprefix(_EXPECTED) for reason in reasons)}{got}"


def _causes(error: Exception) -> Iterator[Exception]:
    found = error.__cause__ or error.__context__
    while isinstance(found, Exception):
        yield found
        found = found.__cause__ or found.__context__


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
