"""``--dry_run true``: a whole recipe in a minute on a CPU, with a tiny random model of the same architecture.

The recipe's own classes, strategy and callbacks run; only sizes, sources and the places written to change.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_swift._tiny import SIZES, write_tiny_folder, write_tiny_text
from lightning_swift.errors import ConfigurationError

__all__ = ["DryRun"]

# Tells the processes that Lightning starts where the first one has put its files.
_VARIABLE = "LIGHTNING_SWIFT_DRY_RUN"
_STEPS = 2
_DEVICES = 2
_LENGTH = 256
# Arguments of callbacks and loggers that say where to write.
_WRITES = ("dirpath", "save_dir", "output", "folder", "directory", "output_dir")
_TEXTS = ("train", "validation", "test", "predict")


class DryRun:
    """The temporary folder of a dry run, shared by its processes.

    Raises:
        ConfigurationError: The processes were not started by Lightning, so they would not find each other's files.
    """

    def __init__(self) -> None:
        shared = os.environ.get(_VARIABLE)
        self._owner = shared is None
        if shared is not None:
            self._folder = Path(shared)
            return
        if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                "a dry run starts its own processes.", where="--dry_run", fix="Run it without torchrun or srun."
            )
        self._folder = Path(tempfile.mkdtemp(prefix="lightning-swift-dry-run-"))
        os.environ[_VARIABLE] = str(self._folder)

    def finish(self) -> None:
        """Remove the folder and what was written into it."""
        if self._owner:
            del os.environ[_VARIABLE]
            shutil.rmtree(self._folder, ignore_errors=True)

    def shrink(self, config: Any) -> None:
        """Change the parsed ``config`` of a training command in place."""
        rank_zero_info("Dry run: a tiny random model, %d steps on the CPU, nothing kept.", _STEPS)
        self._shrink_model(_init_args(config.get("model")))
        self._shrink_data(_init_args(config.get("data")))
        _shrink_trainer(config["trainer"])
        self._shrink_strategy(_init_args(config["trainer"].get("strategy")), config["trainer"]["devices"])
        config["trainer"]["default_root_dir"] = str(self._folder)
        for arguments in _writers(config["trainer"]):
            self._shrink_writer(arguments)
        if "ckpt_path" in config:
            # A checkpoint of the real model does not fit the tiny one.
            config["ckpt_path"] = None

    def _shrink_model(self, arguments: Any) -> None:
        source = arguments.get("path_or_config")
        if source is None:
            rank_zero_info("Dry run: the model has no argument path_or_config, so it is used as it is.")
            return
        folder = self._folder / "model"
        if self._owner:
            rank_zero_info(write_tiny_folder(source, folder, tokenizer=arguments.get("tokenizer")))
        _set(arguments, path_or_config=str(folder), tokenizer=None)
        overrides = arguments.get("config_overrides") or {}
        arguments["config_overrides"] = {key: value for key, value in overrides.items() if key not in SIZES}

    def _shrink_data(self, arguments: Any) -> None:
        for name in _TEXTS:
            source = arguments.get(name)
            if isinstance(source, str):
                text = self._folder / f"{name}.jsonl"
                if self._owner:
                    write_tiny_text(Path(source), text)
                arguments[name] = str(text)
        if isinstance(arguments.get("tokenizer"), str):
            arguments["tokenizer"] = str(self._folder / "model")
        if "max_length" in arguments:
            _set(arguments, max_length=min(arguments["max_length"], _LENGTH), too_long="truncate")
            _set(arguments, batch_size=min(arguments["batch_size"], 2), num_workers=0, cache_dir=str(self._folder))

    def _shrink_strategy(self, arguments: Any, devices: int) -> None:
        if "data_parallel_replicate" in arguments:
            copies = arguments["data_parallel_replicate"]
            several = isinstance(copies, int) and copies > 1
            _set(arguments, data_parallel_shard="auto", data_parallel_replicate=devices if several else 1)
        if "pipeline_parallel_size" in arguments:
            _shrink_pipeline(arguments, devices)
        if arguments.get("process_group_backend"):
            arguments["process_group_backend"] = "gloo"
        if arguments.get("compile"):
            # Traces the blocks as every backend does, without needing a C++ compiler.
            arguments["compile"] = "aot_eager"
        if arguments.get("nvme_path"):
            arguments["nvme_path"] = str(self._folder / "swap")

    def _shrink_writer(self, arguments: Any) -> None:
        for name in _WRITES:
            value = arguments.get(name)
            if isinstance(value, str):
                arguments[name] = str(self._folder / Path(value).name)
        if arguments.get("every_n_train_steps"):
            arguments["every_n_train_steps"] = 1
        if arguments.get("verify") is True:
            arguments["verify"] = False


def _shrink_trainer(trainer: Any) -> None:
    accumulate = min(trainer["accumulate_grad_batches"], 2)
    _set(
        trainer,
        accelerator="cpu",
        devices=_few(trainer["devices"]),
        num_nodes=1,
        max_steps=_STEPS,
        min_steps=None,
        # One epoch of two steps, so that everything that happens at the end of an epoch happens.
        max_epochs=1,
        min_epochs=None,
        max_time=None,
        accumulate_grad_batches=accumulate,
        limit_train_batches=_STEPS * accumulate,
        limit_val_batches=1,
        limit_test_batches=1,
        limit_predict_batches=1,
        val_check_interval=None,
        check_val_every_n_epoch=1,
        log_every_n_steps=1,
    )


def _few(devices: object) -> int:
    """At most two of the devices that ``Trainer(devices=...)`` asks for."""
    if isinstance(devices, list):
        return min(len(devices), _DEVICES)
    try:
        number = int(str(devices))
    except ValueError:
        return _DEVICES
    return _DEVICES if number < 0 else min(number, _DEVICES)


def _shrink_pipeline(arguments: Any, devices: int) -> None:
    """A pipeline of all devices if the recipe has one, else layers cut over all of them."""
    stages = devices if arguments["pipeline_parallel_size"] != 1 else 1
    _set(arguments, pipeline_parallel_size=stages, tensor_parallel_size=devices // stages, data_parallel_replicate=1)
    # The tiny model has as many layers as there are stages at most, and batches of two rows.
    _set(arguments, schedule="1F1B", virtual_stages=None, stage_balance="auto", microbatches=devices)
    for option in ("sequence_parallel", "loss_parallel"):
        arguments[option] = arguments[option] and devices > stages


def _set(section: Any, **values: object) -> None:
    # jsonargparse's Namespace is no mapping, and its `update` is another than that of dict.
    for name, value in values.items():
        section[name] = value


def _writers(trainer: Any) -> Iterator[Any]:
    for key in ("callbacks", "logger"):
        value = trainer.get(key)
        for item in value if isinstance(value, list) else [value]:
            yield _init_args(item)


def _init_args(value: Any) -> Any:
    """The ``init_args`` of a class in a parsed configuration; an empty mapping for anything else."""
    found = value.get("init_args") if hasattr(value, "get") else None
    return {} if found is None else found
