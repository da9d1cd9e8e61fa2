"""Every wrong key and class of a recipe is refused, naming the file and the nearest valid key."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_swift import cli
from lightning_swift._config_check import Checker
from lightning_swift._config_sources import read_sources
from lightning_swift._shipped import recipes
from lightning_swift.errors import ConfigurationError

RECIPES = {recipe.name: recipe.path for recipe in recipes()}


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    from lightning_swift._training_cli import TrainingCLI, valid_keys

    class Stop(Exception):
        pass

    class OnlyParser(TrainingCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            self.found = valid_keys(self._subcommand_parsers["fit"])
            trees.append(self.found)
            raise Stop

    trees: list[dict[str, Any]] = []
    with pytest.raises(Stop):
        OnlyParser(["fit"])
    return trees[0]


def check(tree: dict[str, Any], *arguments: str) -> None:
    sources = read_sources(["fit", *arguments])
    checker = Checker(tree, sources.merged)
    for values, source in sources.values:
        checker.check(values, source)


def key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from key_paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from key_paths(item, (*path, index))


def renamed(value: Any, path: tuple[Any, ...], name: str) -> Any:
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    items = [(name if key == path[-1] else key, item) for key, item in parent.items()]
    parent.clear()
    parent.update(items)
    return value


def misspelt(key: str, number: int) -> str:
    """A letter too many, one too few, or one twice, in turn; most keys stand in several recipes and get them all."""
    middle = len(key) // 2
    wrong = [key + "x", key[:middle] + key[middle + 1 :], key[:middle] + key[middle] + key[middle:]]
    return wrong[number % len(wrong)]


def is_checked(path: tuple[Any, ...]) -> bool:
    """Nothing resembles a misspelt letter, and what may stand in config_overrides only the model knows."""
    return len(str(path[-1])) > 1 and "config_overrides" not in path[:-1]


MUTATIONS = [
    (name, path)
    for name, file in RECIPES.items()
    for path in key_paths(yaml.safe_load(file.read_text()))
    if is_checked(path)
]


@pytest.mark.parametrize("name", RECIPES)
def test_each_misspelt_key_of_each_recipe_is_refused_with_the_right_one(name, tree, tmp_path):
    values = yaml.safe_load(RECIPES[name].read_text())
    for number, (recipe, path) in enumerate(MUTATIONS):
        if recipe == name:
            check_misspelt(values, path, misspelt(path[-1], number), tree, tmp_path / "recipe.yaml")


def check_misspelt(values: Any, path: tuple[Any, ...], wrong: str, tree: dict[str, Any], file: Path) -> None:
    file.write_text(yaml.safe_dump(renamed(values, path, wrong), sort_keys=False))
    with pytest.raises(ConfigurationError) as refused:
        check(tree, "--config", str(file))
    assert f"unknown key {wrong!r}" in refused.value.what, path
    assert f"{path[-1]!r}" in (refused.value.fix or ""), path
    lines = enumerate(file.read_text().splitlines(), 1)
    line = next(number for number, text in lines if text.lstrip("- ").startswith(f"{wrong}:"))
    assert refused.value.where == f"{file}:{line}", path


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_themselves_pass(name, tree):
    check(tree, "--config", name)


CLASSES = [(name, path) for name, path in MUTATIONS if path[-1] == "class_path"]


@pytest.mark.parametrize(("name", "path"), CLASSES, ids=lambda v: ".".join(map(str, v)) if isinstance(v, tuple) else v)
def test_each_misspelt_class_of_each_recipe_is_refused_with_the_right_one(name, path, tree, tmp_path):
    values = yaml.safe_load(RECIPES[name].read_text())
    section = values
    for key in path[:-1]:
        section = section[key]
    right = section["class_path"]
    module, _, short = right.rpartition(".")
    for wrong, nearest in [(right + "x", right), (f"{module}x.{short}", right), (short[:-1], short)]:
        section["class_path"] = wrong
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        with pytest.raises(ConfigurationError) as refused:
            check(tree, "--config", str(tmp_path / "recipe.yaml"))
        assert repr(wrong) in refused.value.what
        assert repr(nearest) in (refused.value.fix or "")
        assert str(tmp_path / "recipe.yaml") in (refused.value.where or "")


def refusal(tree: dict[str, Any], tmp_path: Path, text: str, *more: str) -> ConfigurationError:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        check(tree, "--config", str(file), *more)
    return refused.value


@pytest.mark.parametrize("section", ["modell: {}", "trainr:", "callbacks: []"])
def test_unknown_sections_are_refused_even_when_empty(section, tree, tmp_path):
    key = section.split(":")[0]
    assert f"unknown key {key!r}" in refusal(tree, tmp_path, section).what


def test_a_class_of_the_wrong_kind_is_refused(tree, tmp_path):
    error = refusal(tree, tmp_path, "model: {class_path: lightning_swift.ChatDataModule}")
    assert "not a LightningModule" in error.what


def test_init_args_find_their_class_in_another_source(tree, tmp_path):
    error = refusal(tree, tmp_path, "model: {init_args: {lrr: 1}}", "--model", "CausalLM")
    assert "'lr'" in (error.fix or "")
    check(tree, "--config", "sft_fsdp", "--model.lr", "1e-3", "--data.init_args.batch_size", "2")


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--trainer.max_stepz", "3"], "max_steps"),
        (["--trainer.max_stepz=3"], "max_steps"),
        (["--modell.lr", "3"], "model"),
        (["--model.lrx", "3"], "lr"),
        (["--model.init_args.lrx", "3"], "lr"),
        (["--data.batchsize", "3"], "batch_size"),
        (["--data", "ChatDatModule"], "ChatDataModule"),
        (["--trainer.strategy", "FSDPBF16Strateg"], "FSDPBF16Strategy"),
        (["--dryrun", "true"], "dry_run"),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpth=x", "--trainer.callbacks+=Timer"],
            "dirpath",
        ),
    ],
)
def test_misspelt_options_are_refused_with_the_right_one(arguments, nearest, tree):
    if "FSDPBF16Strateg" in arguments:
        from lightning_swift._training_cli import check_strategy_name

        with pytest.raises(ConfigurationError) as refused:
            check_strategy_name({"trainer": {"strategy": arguments[1]}}, "command line")
    else:
        with pytest.raises(ConfigurationError) as refused:
            check(tree, "--config", "sft_fsdp", *arguments)
    assert f"{nearest!r}" in (refused.value.fix or "")
    assert refused.value.where == "command line"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.logger", "false"],
        ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=step"],
        [
            "--trainer.callbacks+=ModelCheckpoint",
            "--trainer.callbacks.dirpath=x",
            "--trainer.callbacks+={class_path: EarlyStopping}",
            "--trainer.callbacks.monitor=loss",
        ],
        ["--trainer.strategy", "swift_fsdp_bf16"],
        ["--trainer", '{"max_steps": 3}'],
        ["--model.help", "CausalLM"],
        ["--model", "null"],
        ["--model.path_or_config", '{"model_type": "llama", "hidden_size": 64}'],
        ["--ckpt_path", "newest"],
        ["--print_config"],
        ["--optimizer", "AdamW", "--optimizer.lr", "1"],
    ],
    ids=" ".join,
)
def test_valid_options_pass(arguments, tree):
    check(tree, "--config", "sft_fsdp", *arguments)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "twice.yaml"
    file.write_text("trainer:\n  max_steps: 1\n  max_epochs: 2\n  max_steps: 3\n")
    with pytest.raises(ConfigurationError, match=r"twice.yaml:4: 'max_steps' stands there twice, first in line 2"):
        read_sources(["fit", "--config", str(file)])


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just text", "", "a: !!python/object:os.system {}"])
def test_a_file_without_settings_is_refused(text, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"r\.yaml"):
        read_sources(["fit", "--config", str(tmp_path / "r.yaml")])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config", "sft_fdsp"], "'sft_fsdp'"),
        (["--config", "sft_fsdp", "--trainer.max_stepz", "1"], "'max_steps'"),
        (["--config", "sft_fsdp", "--trainer.max_steps", "many"], "trainer.max_steps"),
        (["--config", "sft_fsdp", "--trainer.strategy", "swift_fsdp_bf61"], "'swift_fsdp_bf16'"),
        # The full name: a library that the process has imported may have an AdamW of its own.
        (["--config", "sft_fsdp", "--optimizer", "torch.optim.AdamW"], "CausalLM has no parameters yet"),
        (["--config", "sft_fsdp", "stray"], "stray"),
    ],
)
def test_the_command_refuses_them_on_one_line_with_code_2(arguments, told, capsys):
    assert cli.main(["fit", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert told in errors[0]
    assert "Traceback" not in captured.err
