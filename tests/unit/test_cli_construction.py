"""Errors of constructors reach the user as they were raised, and jsonargparse's refusals as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy

from lightning_swift import cli
from lightning_swift._reasons import readable
from tests.unit.test_cli import QUIET as NO_FILES

pytestmark = [
    # Lightning calls jsonargparse by old names.
    pytest.mark.filterwarnings(r"ignore:\s+(``instantiate_classes``|skip_none parameter) was deprecated"),
    # Nothing is to be gained for the model that fails in training.
    pytest.mark.filterwarnings("ignore:The .*_dataloader. does not have many workers"),
]
MINE = """
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel


class Broken(BoringModel):
    def __init__(self, n: int = 0):
        super().__init__()
        try:
            1 / n
        except ZeroDivisionError:
            raise ValueError("n must not be zero")


class Forgetful(Callback):
    def __init__(self) -> None:
        {}["gone"]


class Fails(BoringModel):
    def training_step(self, batch, batch_idx):
        raise ValueError("in training")
"""
# In this process no seed is wanted: it would stay for the tests that follow.
QUIET = [*NO_FILES, "--seed_everything=false"]
FSDP = ["--trainer.strategy=FSDPBF16Strategy"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "classes_of_the_user"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def refusal(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == err.splitlines()[-1:]
    assert "Union" not in lines[0]
    return lines[0]


def test_the_model_folder_is_not_there(capsys):
    told = refusal(["fit", "--model=CausalLM", "--model.path_or_config=nofolder", *QUIET], 1, capsys)
    assert told.startswith("error: nofolder: is not a folder on this machine. Give the path")


def test_a_wrong_value_for_the_strategy_is_a_wrong_configuration(mine, capsys):
    more = [*FSDP, "--trainer.strategy.compile=banana"]
    told = refusal(["fit", f"--model={mine}.Fails", *QUIET, *more], 2, capsys)
    assert told.startswith("error: compile: compile='banana' is not a backend")


def test_a_callback_of_lightning_says_what_is_wrong(mine, capsys):
    more = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_top_k=-7"]
    assert "Invalid value for save_top_k=-7" in refusal(["fit", f"--model={mine}.Fails", *QUIET, *more], 2, capsys)


def test_an_error_of_a_users_constructor_names_its_line(mine, capsys):
    told = refusal(["fit", f"--model={mine}.Broken", *QUIET], 2, capsys)
    assert f"{mine}.py:12: ValueError: n must not be zero" in told
    told = refusal(["fit", f"--model={mine}.Fails", f"--trainer.callbacks={mine}.Forgetful", *QUIET], 2, capsys)
    assert f"{mine}.py:17: KeyError: 'gone'" in told
    assert cli.main(["fit", f"--model={mine}.Broken", *QUIET, "--debug"]) == 2
    assert "1 / n" in capsys.readouterr().err


def test_an_error_while_training_keeps_its_traceback(mine):
    with pytest.raises(ValueError, match="in training"):
        cli.main(["fit", f"--model={mine}.Fails", *QUIET, "--trainer.max_steps=1"])


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("fit", ["--model=CausalLM", "--model.lr=abc"], "model: lr: Expected float. Got value: abc."),
        (
            "validate",
            [*FSDP, "--trainer.strategy.data_parallel_replicate=banana"],
            "trainer.strategy: data_parallel_replicate: Expected int or Literal['auto']. Got value: banana.",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_the_type_wanted(command, arguments, told, capsys):
    expected = f"error: {told} See `lightning-swift {command} --help`."
    assert refusal([command, *arguments], 2, capsys) == expected


def test_a_refusal_that_is_no_union_is_left_as_it_is():
    assert readable("something\n  else.") == "something else."
    assert len(readable("x" * 9000)) < 700


@pytest.mark.parametrize("name", ["FSDPBF16Strategy", "lightning_swift.FSDPBF16Strategy", "SingleDeviceStrategy"])
def test_a_strategy_may_be_given_by_the_name_of_its_class_alone(name, mine, monkeypatch):
    built: list[Strategy] = []
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda self, _: built.append(self.trainer.strategy))
    assert cli.main(["fit", f"--model={mine}.Fails", f"--trainer.strategy={name}", *QUIET]) == 0
    assert [type(strategy).__name__ for strategy in built] == [name.rpartition(".")[2]]


def test_a_strategy_that_is_not_there_is_named(mine, capsys):
    told = refusal(["fit", f"--model={mine}.Fails", "--trainer.strategy=no.where", *QUIET], 2, capsys)
    assert "no.where" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_recipe_for_gpus_says_how_it_runs_without(mine, capsys):
    told = refusal(["fit", f"--model={mine}.Fails", *QUIET, "--trainer.accelerator=gpu"], 2, capsys)
    assert "gpu" in told
    assert "--trainer.accelerator cpu" in told
