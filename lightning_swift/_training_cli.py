"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with every option of Lightning's own.

On top of it: recipes by name, wrong keys refused with the nearest valid one, one-line errors, ``--dry_run``.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn, TypeVar, cast

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_swift._config_check import Checker
from lightning_swift._config_sources import Sources, read_sources
from lightning_swift._dry_run import DryRun
from lightning_swift._reasons import construction_error, readable
from lightning_swift._shipped import nearest
from lightning_swift._signatures import ANYTHING, known_classes, parameters
from lightning_swift.errors import ConfigurationError

__all__ = ["TrainingCLI", "check_strategy_name", "run_training", "valid_keys"]

_T = TypeVar("_T")
_TERMINATED = 143  # 128 + SIGTERM, as a shell reports it
# Modules whose classes recipes may name without a path.
_SHORT_NAMES = ("lightning_swift", "lightning_swift.callbacks")
# Seconds that the other ranks get to report their own error before they are ended.
_GRACE = 3.0
_UNHELPFUL = (
    # Lightning, DeepSpeed and peft use names that torch and transformers deprecate: nothing a user could change.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
    "`is_gradient_checkpointing` is deprecated",
    # The strategy prints its precision itself.
    r"Precision .* is not supported by the model summary",
)
# What Lightning says where a recipe's `accelerator: gpu` finds none.
_NO_GPU = "No supported gpu backend"
_WITHOUT_GPU = (
    "Try the recipe with --dry_run true, or train on CPUs with --trainer.accelerator cpu --trainer.devices 1."
)
_CLASSES = {"model": LightningModule, "data": LightningDataModule, "optimizer": Optimizer, "lr_scheduler": LRScheduler}


class _Parser(LightningArgumentParser):
    """Raises what jsonargparse would print with a page of usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # As it is: the parser of a section calls this too, and that of the whole quotes what it has raised.
        raise ConfigurationError(message) from ex


class TrainingCLI(LightningCLI):
    """LightningCLI with the checks and options of this package.

    Args:
        arguments: Sub-command and options.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        for module in _SHORT_NAMES:
            loaded = import_module(module)
            for name in loaded.__all__:
                getattr(loaded, name)
        self._sources: Sources = read_sources(arguments)
        self._dry_run: DryRun | None = None
        try:
            super().__init__(
                args=cast(Any, self._sources.arguments),
                parser_class=_Parser,
                parser_kwargs={"prog": "lightning-swift"},
                # A second run of the same recipe into the same folder is no fault.
                save_config_kwargs={"overwrite": True},
            )
        finally:
            self._finish()

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--dry_run",
            type=bool,
            default=False,
            help="Check the whole recipe in a minute on a CPU: two steps of a tiny random model of the same "
            "architecture on at most two devices, in a temporary folder.",
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        command = self._sources.command
        tree = valid_keys(self._subcommand_parsers[command])
        checker = Checker(tree, self._sources.merged)
        for values, source in self._sources.values:
            checker.check(values, source)
            check_strategy_name(values, source.at(("trainer", "strategy")))
        # LightningCLI warns when it gets arguments while the process has its own; ours are those, completed.
        try:
            self.config = parser.parse_args(args)
        except ConfigurationError as error:
            fix = f"See `lightning-swift {command} --help`."
            raise ConfigurationError(readable(error.what), fix=fix) from error

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[str(self.subcommand)]
        _refuse_optimizer_of_lazy_model(config)
        _find_strategy_class(config["trainer"])
        if config.pop("dry_run"):
            self._dry_run = DryRun()
            self._dry_run.shrink(config)

    @override
    def instantiate_classes(self) -> None:
        raised: list[Exception] = []

        def build(cls: type[_T], *arguments: Any, **options: Any) -> _T:
            try:
                return cls(*arguments, **options)
            except Exception as error:
                raised.append(error)
                raise

        # Models and data modules are built by functions of Lightning, which come first; the rest by this one.
        self.parser.add_instantiator(build, object)
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            found = construction_error(error, raised)
            if found is error:
                raise
            # One that was raised before has its own traceback for --debug, and is part of that of `error`.
            raise found from (None if found.__traceback__ else error)

    def _finish(self) -> None:
        if self._dry_run is not None:
            self._dry_run.finish()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        atexit.register(_end_children, trainer)
        return trainer


def run_training(arguments: Sequence[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict``.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: Options or a recipe are refused.
        KeyboardInterrupt: Ctrl-C.
    """
    # `python -m` has the working directory on the path, and so users' own modules in `class_path`; a script has not.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with warnings.catch_warnings():
            for message in _UNHELPFUL:
                warnings.filterwarnings("ignore", message)
            TrainingCLI(arguments)
    except SIGTERMException:
        return _TERMINATED
    except SystemExit as stop:
        # Lightning answers Ctrl-C by leaving with code 1.
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None
        return _code_of(stop)
    except MisconfigurationException as error:
        fix = _WITHOUT_GPU if _NO_GPU in str(error) else None
        raise ConfigurationError(str(error), fix=fix) from error
    return 0


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    return stop.code if isinstance(stop.code, int) else 1


def valid_keys(parser: LightningArgumentParser) -> dict[str, Any]:
    """Every key that a recipe may have, as nested mappings with type hints as leaves."""
    trainer = parameters(Trainer) or {}
    tree: dict[str, Any] = {}
    for destination in parser.get_defaults(skip_validation=True).keys():  # noqa: SIM118  # a Namespace iterates otherwise
        section = tree
        *parents, last = str(destination).split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = _CLASSES.get(destination, trainer.get(last, ANYTHING) if parents == ["trainer"] else ANYTHING)
    return {**_CLASSES, **tree, "config": ANYTHING, "help": ANYTHING, "print_config": ANYTHING}


def check_strategy_name(values: Mapping[str, Any], where: str) -> None:
    """Check ``trainer.strategy`` where it is a name: a registered one, or that of a class.

    Raises:
        ConfigurationError: There is none of this name; the nearest is named.
    """
    section = values.get("trainer")
    name = section.get("strategy") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or "." in name:
        return
    classes = [path.rpartition(".")[2] for path in known_classes([Strategy])]
    names = ["auto", *StrategyRegistry.available_strategies()]
    if name.lower() not in names and name not in classes:
        raise ConfigurationError(
            f"there is no strategy {name!r}.", where=where, fix=f"The nearest is {nearest(name, [*names, *classes])!r}."
        )


def _find_strategy_class(trainer: Any) -> None:
    """Replace a strategy that is given by the name of its class alone, which Trainer takes for a registered name."""
    name = trainer.get("strategy")
    if not isinstance(name, str):
        return
    paths = [path for path in known_classes([Strategy]) if path.rpartition(".")[2] == name]
    if "." in name or paths:
        trainer["strategy"] = Namespace(class_path=paths[0] if paths else name)


def _refuse_optimizer_of_lazy_model(config: Any) -> None:
    model = config.get("model")
    if config.get("optimizer") is None or model is None or "class_path" not in model:
        return
    module, _, name = model["class_path"].rpartition(".")
    cls = getattr(import_module(module), name)
    if isinstance(cls, type) and is_overridden("configure_model", cls, parent=LightningModule):
        raise ConfigurationError(
            f"{name} has no parameters yet when LightningCLI builds this optimizer.",
            where="--optimizer",
            fix=f"Use the arguments of {name} (`lightning-swift fit --model.help {name}`), or override "
            "configure_optimizers.",
        )


def _end_children(trainer: Trainer) -> None:
    """End the other ranks that Lightning has started when this one leaves early; they may wait for it for ever."""
    launcher = getattr(trainer.strategy, "launcher", None)
    processes: list[subprocess.Popen[bytes]] = getattr(launcher, "procs", [])
    for process in processes:
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
