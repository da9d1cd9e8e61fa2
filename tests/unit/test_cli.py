"""The command line: exit codes, one-line errors, pure JSON, light imports, and a frozen list of commands and flags."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_swift import _commands, cli
from lightning_swift.errors import CheckpointCorruptError, ConfigurationError
from tests.harness.commands import start_command
from tests.harness.signals import interruptible

COMMANDS = {
    "fit": [],
    "validate": [],
    "test": [],
    "predict": [],
    "merge": [
        "--base",
        "--dtype",
        "--json",
        "--max-shard-size",
        "--no-verify-hashes",
        "--overwrite",
        "checkpoint",
        "output",
    ],
    "export": [
        "--base",
        "--dtype",
        "--format",
        "--json",
        "--max-shard-size",
        "--no-verify",
        "--overwrite",
        "checkpoint",
        "output",
    ],
    "inspect": ["--json", "--no-verify-hashes", "checkpoint"],
    "generate": ["--device", "--max-new-tokens", "--prompt", "--seed", "--temperature", "folder"],
    "plan": sorted(
        [
            *("--gpu", "--gpus", "--nodes", "--seq-length", "--batch-size", "--global-batch", "--goal", "--lora-r"),
            *("--dora", "--dropout", "--loss", "--chunk", "--checkpointing", "--strategy", "--dtype", "--optimizer"),
            *("--tensor-parallel", "--pipeline-parallel", "--host-memory", "--network", "--tokens", "--price"),
            *("--calibration", "--trace", "--output", "--plot", "--json", "model"),
        ]
    ),
    "recipes": ["--json"],
}


def subparsers() -> dict[str, argparse.ArgumentParser]:
    parser = cli.build_parser()
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def test_commands_and_flags_are_the_documented_ones():
    # People's scripts depend on these: a change here is a change for the changelog.
    found = {
        name: sorted(
            (action.option_strings or [action.dest])[-1] for action in parser._actions if action.dest != "help"
        )
        for name, parser in subparsers().items()
    }
    assert found == COMMANDS


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required: COMMAND"),
        (["fti"], "'fit'"),
        (["merge"], "required: CHECKPOINT, OUTPUT"),
        (["merge", "a", "b", "--dtype", "float8"], "'bfloat16'"),
        (["merge", "a", "b", "--dtpe", "float32"], "--dtpe"),
        (["export", "a", "b", "--format", "gguf"], "'safetensors'"),
        (["generate", "folder"], "--prompt"),
        (["generate", "folder", "--prompt", "x", "--topk", "3"], "--topk 3"),
        (["recipes", "extra"], "extra"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(arguments, told, capsys):
    code, out, err = run(arguments, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert told in err
    command = f"{arguments[0]} " if arguments and arguments[0] in COMMANDS else ""
    assert f"`lightning-swift {command}--help`" in err


@pytest.mark.parametrize("command", ["merge", "export", "inspect", "generate"])
def test_something_that_is_not_there_is_one_line_and_exit_code_1(command, tmp_path, capsys):
    more = {"merge": [str(tmp_path / "o")], "export": [str(tmp_path / "o")], "generate": ["--prompt", "x"]}
    code, out, err = run([command, str(tmp_path / "missing"), *more.get(command, [])], capsys)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "missing" in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["merge", "export", "inspect"])
def test_an_ordinary_checkpoint_file_is_told_apart(command, tmp_path, capsys):
    (tmp_path / "ddp.ckpt").write_bytes(b"PK")
    output = [] if command == "inspect" else [str(tmp_path / "o")]
    code, out, err = run([command, str(tmp_path / "ddp.ckpt"), *output], capsys)
    assert (code, out) == (1, "")
    assert "ddp.ckpt: this is a file" in err
    assert "--ckpt_path" in err


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(_commands, "_recipes", fail)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointCorruptError("cut short.", where="a.ckpt"), 1),
        (OSError(28, "No space left on device"), 1),
        (ConfigurationError("no."), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: getattr(type(value), "__name__", value),
)
def test_exit_codes(error, code, monkeypatch, capsys):
    fail_with(error, monkeypatch)
    assert run(["recipes"], capsys)[0] == code
    fail_with(error, monkeypatch)
    assert "Traceback" in run(["recipes", "--debug"], capsys)[2]


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    fail_with(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        cli.main(["recipes"])


def test_an_error_of_several_lines_is_printed_as_one(monkeypatch, capsys):
    fail_with(CheckpointCorruptError("first\n  second"), monkeypatch)
    assert run(["recipes"], capsys)[2] == "error: first second\n"


def test_other_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    fail_with(ConfigurationError("no."), monkeypatch)
    assert run(["recipes"], capsys)[2] == "[rank 1] error: no.\n"


@pytest.mark.parametrize("whole", [True, False])
def test_inspect_json_is_one_object_and_the_exit_code_is_the_verdict(whole, monkeypatch, capsys):
    from lightning_swift.checkpoint import inspect

    answer = {"path": "x", "whole": whole, "reason": None, "bytes": 2_000_000, "files": {"a": 1}, "mesh": {}}
    monkeypatch.setattr(inspect, "describe", lambda checkpoint, *, hashes: answer)
    code, out, err = run(["inspect", "x", "--json"], capsys)
    assert json.loads(out) == answer
    assert err == ""
    assert code == (0 if whole else 1)
    code, out, _ = run(["inspect", "x"], capsys)
    assert "2.0 MB" in out
    assert ("yes" if whole else "no") in out


NOISY = """
import logging, subprocess, sys
from lightning_swift import cli
from lightning_swift.models import generation


def generate(*arguments, **options):
    print("a library that prints")
    logging.StreamHandler(sys.stdout).emit(logging.makeLogRecord({"msg": "one that logs"}))
    subprocess.run(["echo", "a child process"], check=True)
    return "The answer."


generation.generate = generate
sys.exit(cli.main(["generate", "folder", "--prompt", "x"]))
"""


def test_what_libraries_write_to_stdout_does_not_mix_with_the_result():
    result = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert result.stdout == "The answer.\n"
    for noise in ("prints", "logs", "child"):
        assert noise in result.stderr


def test_recipes_prints_names_purposes_and_measurements(capsys):
    code, out, _ = run(["recipes"], capsys)
    assert code == 0
    assert "sft_fsdp" in out
    assert "measured:" in out
    listed = json.loads(run(["recipes", "--json"], capsys)[1])
    assert set(listed) == {"recipes"}


def test_help_of_every_command_that_does_not_train(capsys):
    for name in set(COMMANDS) - {"fit", "validate", "test", "predict"}:
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert f"lightning-swift {name}" in out
        assert "default" in out or name in {"inspect", "recipes"}
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "exit codes:" in out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["recipes"], ["inspect", "missing"], ["merge", "missing", "o"], ["--version"]])
def test_these_commands_load_neither_torch_nor_lightning(arguments, tmp_path):
    code = (
        "import sys; from lightning_swift.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_the_module_is_the_command_and_a_closed_pipe_is_no_traceback():
    result = subprocess.run(
        f"{sys.executable} -m lightning_swift recipes | true", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in result.stderr


def test_ctrl_c_while_training_is_130(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "lightning_swift", "fit", "--model", "slow.Slow", *QUIET]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=interruptible,
    )
    wait_for(tmp_path / "started", process.poll)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error: interrupted" in err
    assert "Traceback" not in err


def test_sigterm_while_training_is_no_success(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    process = start_command(["fit", "--model", "slow.Slow", *QUIET], tmp_path, output=tmp_path)
    wait_for(tmp_path / "started", lambda: process.exitcode)
    process.terminate()
    process.join(60)
    assert process.exitcode == 143


QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
]
SLOW = """
import pathlib, time
from lightning.pytorch.demos.boring_classes import BoringModel


class Slow(BoringModel):
    def training_step(self, batch, batch_idx):
        pathlib.Path("started").touch()
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)
"""


def wait_for(path: Path, exit_code: Callable[[], int | None]) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert exit_code() is None
        assert time.monotonic() < end
        time.sleep(0.05)
