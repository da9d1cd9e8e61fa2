"""The commands that do not train: their options, what they call, what they print.

Nothing heavy is imported here: ``merge``, ``inspect`` and ``recipes`` never load torch or Lightning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from lightning_swift import __version__
from lightning_swift._plan_command import add_plan

__all__ = ["add_commands", "version"]

_DTYPES = ("float32", "bfloat16", "float16")
_Commands = Any  # argparse does not export the type that add_subparsers returns


def version() -> str:
    """The line that ``--version`` prints."""
    parts = [f"lightning-swift {__version__}"]
    for package in ("lightning", "torch", "transformers"):
        try:
            parts.append(f"{package} {installed_version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} is not installed")
    return ", ".join(parts)


def add_commands(commands: _Commands) -> None:
    """Add ``plan``, ``merge``, ``export``, ``inspect``, ``generate`` and ``recipes`` to a parser's sub-commands."""
    add_plan(commands)
    _add_merge(commands)
    _add_export(commands)
    _add_inspect(commands)
    _add_generate(commands)
    _add_recipes(commands)


def _add(
    commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], *, help: str, more: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=f"{help[0].upper()}{help[1:]}. {more}".strip(), allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_checkpoint_and_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a sharded checkpoint (NAME.ckpt/)")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert the weights (default: as they are stored)")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest safetensors file (default: %(default)s)"
    )


def _add_overwrite_and_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace OUTPUT if it is an earlier merge or export, once the new one is whole",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="where the pretrained folder lies now, if it has moved since the checkpoint was saved without the frozen "
        "weights",
    )


def _add_hashes_and_json(parser: argparse.ArgumentParser, *, default: bool) -> None:
    parser.add_argument(
        "--verify-hashes",
        action=argparse.BooleanOptionalAction,
        default=default,
        help="compare every file with its SHA-256 in the manifest (default: %(default)s); names, sizes and structure "
        "are always checked, and what is merged is checked by its CRC-32",
    )
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_merge(commands: _Commands) -> None:
    parser = _add(
        commands,
        "merge",
        _merge,
        help="turn a sharded checkpoint into a Hugging Face safetensors folder",
        more="Reads and writes piece by piece in little memory, on any machine, without torch.",
    )
    _add_checkpoint_and_output(parser)
    _add_overwrite_and_base(parser)
    _add_hashes_and_json(parser, default=False)


def _merge(options: argparse.Namespace) -> int:
    from lightning_swift.checkpoint.merge import merge_checkpoint

    with _stdout_for_results():
        report = merge_checkpoint(
            options.checkpoint,
            options.output,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            verify_hashes=options.verify_hashes,
            overwrite=options.overwrite,
            base=options.base,
        )
    if options.json:
        return _print_json(asdict(report))
    adapter = f", adapter {report.adapter!r} merged" if report.adapter else ""
    print(
        f"{report.output}: {report.tensors} tensors, {report.parameters / 1e6:.1f} M parameters, mostly "
        f"{report.dtype}, {_size(report.nbytes)}{adapter}; hashes "
        f"{'compared' if report.hashes_verified else 'of tensors not compared (their CRC-32 was)'}"
    )
    return 0


def _add_export(commands: _Commands) -> None:
    parser = _add(
        commands,
        "export",
        _export,
        help="make a folder that inference engines load, and check it",
        more="The folder is loaded again in a fresh process and has to give the checkpoint's own logits.",
    )
    _add_checkpoint_and_output(parser)
    parser.add_argument(
        "--format",
        choices=("safetensors", "adapter"),
        default="safetensors",
        help="whole model, or LoRA adapter only (default: %(default)s)",
    )
    _add_overwrite_and_base(parser)
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="skip loading the folder again")
    _add_json(parser)


def _export(options: argparse.Namespace) -> int:
    with _stdout_for_results():
        from lightning_swift.checkpoint.export import export_checkpoint

        report = export_checkpoint(
            options.checkpoint,
            options.output,
            format=options.format,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            verify=options.verify,
            overwrite=options.overwrite,
            base=options.base,
        )
    if options.json:
        return _print_json(asdict(report))
    checked = (
        f"loaded again in a fresh process: {report.tensors} tensors and the logits of {report.tokens} tokens compared, "
        f"largest logit difference {report.max_logit_gap:g}"
        if report.verified
        else "not loaded again (--no-verify)"
    )
    print(f"{report.output}: {report.format}, {_size(report.nbytes)}; {checked}")
    return 0


def _add_inspect(commands: _Commands) -> None:
    parser = _add(commands, "inspect", _inspect, help="say what is in a checkpoint and whether it is whole")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a sharded checkpoint (NAME.ckpt/)")
    _add_hashes_and_json(parser, default=True)


def _inspect(options: argparse.Namespace) -> int:
    from lightning_swift.checkpoint.inspect import describe

    description = describe(options.checkpoint, hashes=options.verify_hashes)
    if options.json:
        _print_json(description)
    else:
        for key, value in description.items():
            print(f"{key.replace('_', ' ') + ':':<18}{_readable(key, value)}")
    # A script that asks whether a checkpoint is whole looks at the exit code.
    return 0 if description["whole"] else 1


def _add_generate(commands: _Commands) -> None:
    parser = _add(commands, "generate", _generate, help="let an exported model answer a prompt")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face model folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to answer; `-` reads standard input")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="above 0: draw instead of taking the likeliest token",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda (default: %(default)s)")


def _generate(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with _stdout_for_results():
        from lightning_swift.models.generation import generate

        text = generate(
            options.folder,
            prompt,
            options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            device=options.device,
        )
    print(text)
    return 0


def _add_recipes(commands: _Commands) -> None:
    parser = _add(commands, "recipes", _recipes, help="list the shipped recipes with their measured memory and time")
    _add_json(parser)


def _recipes(options: argparse.Namespace) -> int:
    from lightning_swift._shipped import recipes

    found = recipes()
    if options.json:
        listed = {r.name: {"path": str(r.path), "purpose": r.purpose, "measured": r.measured} for r in found}
        return _print_json({"recipes": listed})
    for recipe in found:
        print(f"{recipe.name}\n    {recipe.purpose}\n    measured: {recipe.measured or 'not yet'}\n    {recipe.path}")
    print("\nRun one with: lightning-swift fit --config NAME [--trainer.max_steps 100 ...]")
    print("Try one on a laptop with: lightning-swift fit --config NAME --dry_run true")
    return 0


@contextmanager
def _stdout_for_results() -> Iterator[None]:
    """Send to stderr what libraries and child processes write to stdout meanwhile (some log there)."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _print_json(value: dict[str, Any]) -> int:
    print(json.dumps(value, indent=1, default=str))
    return 0


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _readable(key: str, value: Any) -> str:
    if key == "bytes":
        return _size(value)
    if key == "files":
        return f"{len(value)}, the largest {max(value, key=value.get)}" if value else "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(name, item)}" for name, item in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
