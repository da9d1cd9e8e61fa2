"""The ``lightning-swift`` command: finds the sub-command, and turns its outcome into an exit code. Imports no torch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from typing_extensions import override

from lightning_swift import _commands
from lightning_swift.errors import ConfigurationError, SwiftError

__all__ = ["FAILED", "INTERRUPTED", "USAGE", "main"]

FAILED = 1
USAGE = 2
INTERRUPTED = 130

_DEBUG = "--debug"
_TRAINING = {
    "fit": "train a model (and validate it) as a recipe says",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "run inference on the prediction data",
}
# On importing it, bitsandbytes asks for a package that would speed up what the strategies switch off; peft imports it.
_UNHELPFUL_LOGGER = "bitsandbytes.backends.cpu.ops"
_EPILOG = """\
exit codes:
  0    success
  1    the command failed (a damaged checkpoint, bad data, an export that does not match, ...)
  2    options or configuration refused
  130  interrupted (Ctrl-C)
Errors are one line on stderr; --debug, anywhere on the line, adds the traceback."""


class _Parser(argparse.ArgumentParser):
    """Reports wrong options as the one-line errors that everything else gives."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}.", fix=f"See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program name; those of the process by default.

    Returns:
        The exit code: 0 on success only.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _DEBUG in arguments
    logging.getLogger(_UNHELPFUL_LOGGER).setLevel(logging.ERROR)
    try:
        return _run([argument for argument in arguments if argument != _DEBUG])
    except KeyboardInterrupt:
        _complain("interrupted", debug=debug)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConfigurationError as error:
        _complain(str(error), debug=debug)
        return USAGE
    except (SwiftError, OSError) as error:
        _complain(str(error), debug=debug)
        return FAILED


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _TRAINING:
        from lightning_swift._training_cli import run_training

        return run_training(arguments)
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        # argparse leaves these to the outermost parser, whose help does not list the options of a command.
        raise ConfigurationError(
            f"unrecognized arguments: {' '.join(unknown)}.", fix=f"See `{parser.prog} {options.command} --help`."
        )
    code: int = options.run(options)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; those that train hand their options on to LightningCLI."""
    parser = _Parser(
        prog="lightning-swift",
        description="Train, merge, export and try large language models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_commands.version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, purpose in _TRAINING.items():
        commands.add_parser(name, help=f"{purpose} (`lightning-swift {name} --help`)", add_help=False)
    _commands.add_commands(commands)
    return parser


def _complain(message: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    # Every rank of a training run has this process's stderr: say which one speaks, except for the first.
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    speaker = "" if rank == "0" else f"[rank {rank}] "
    print(f"{speaker}error: {' '.join(message.split())}", file=sys.stderr)
