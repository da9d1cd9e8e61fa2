"""Where a model comes from: a folder with weights, or a configuration and a seed; and the tokenizer beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models._folder import IMPLEMENTATIONS, has_weights, read_config, read_json, unknown_option
from lightning_swift.models.lazy import Precision, lazy_pretrained

__all__ = ["ModelSource", "check_vocabulary", "load_tokenizer"]

# Any of these makes a folder one that a tokenizer can be read from.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelSource:
    """A checked answer to "which model": its configuration, and its folder if weights are to be read from it.

    Attributes:
        plain: The user's own answer as plain data, for hyper-parameters.
        config: The ``PretrainedConfig``.
        folder: The folder it came from, None for a configuration given as an object.
        pretrained: Whether weights are read from ``folder``.
        dtype: Type of the parameters.
        overrides: Changed options of the configuration.
        seed: Of random weights.
    """

    plain: str | dict[str, Any]
    config: Any
    folder: Path | None
    pretrained: bool
    dtype: Precision
    overrides: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, given: Any, *, dtype: Precision, overrides: Mapping[str, Any], seed: int) -> ModelSource:
        """Check what the user gave.

        Raises:
            ModelError: The folder, file or configuration describes no model that can be built.
            ConfigurationError: ``given`` is of another type, or an option is unknown.
        """
        if dtype not in get_args(Precision):
            raise ConfigurationError(
                f"dtype {dtype!r} is not supported.",
                where="CausalLM",
                fix=f"Use one of {get_args(Precision)}.",
            )
        if not isinstance(given, str | Path):
            config = _config_of(given, overrides)
            return cls(config.to_dict(), config, None, False, dtype, overrides, seed)
        path = Path(given)
        if path.suffix == ".json" and path.name != "config.json" and path.is_file():
            config = _config_of(read_json(path), overrides)
            return cls(str(given), config, path.parent, False, dtype, overrides, seed)
        folder = path.parent if path.name == "config.json" else path
        config = read_config(folder, overrides)
        pretrained = folder is path and has_weights(folder)
        if folder is path and not pretrained:
            rank_zero_warn(f"{folder} holds no weights: training starts from random ones, seed {seed}.")
        return cls(str(given), config, folder, pretrained, dtype, overrides, seed)

    def build(self) -> Any:
        """The model: without weights if it is pretrained, else with random ones, the same on every rank."""
        if self.pretrained:
            return lazy_pretrained(str(self.folder), dtype=self.dtype, **self.overrides)
        from transformers import AutoModelForCausalLM

        # Drawn on the CPU whatever device a strategy prefers: the same numbers everywhere.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config), dtype=getattr(torch, self.dtype), trust_remote_code=False
            )


def _config_of(given: Any, overrides: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if isinstance(given, PretrainedConfig):
        config = copy.deepcopy(given)
    elif isinstance(given, Mapping):
        values = dict(given)
        kind = values.pop("model_type", None)
        if kind not in CONFIG_MAPPING:
            raise ModelError(
                f"transformers has no model type {kind!r}.",
                where="path_or_config",
                fix="Give model_type as in the config.json of such a model, 'llama' for example.",
            )
        config = AutoConfig.for_model(kind, **values)
    else:
        raise ConfigurationError(
            f"a model cannot be built from a {type(given).__name__}.",
            where="path_or_config",
            fix="Give the path of a folder or of a config.json, or a configuration as dict.",
        )
    for name, value in overrides.items():
        attribute = f"_{name}" if name in IMPLEMENTATIONS else name
        if not hasattr(config, attribute):
            raise unknown_option(config, [name])
        setattr(config, attribute, value)
    return config


def load_tokenizer(place: str | Path | None, *, required: bool) -> Any:
    """The tokenizer in the folder ``place``; None if it has none and none is ``required``.

    Raises:
        ModelError: It is required and missing, or cannot be read.
    """
    if place is None:
        return None
    folder = Path(place)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if not required:
            return None
        raise ModelError(
            "holds no tokenizer.", where=str(folder), fix="Give the folder that tokenizer.json or its like lies in."
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the tokenizer cannot be read ({error}).", where=str(folder), fix="Fetch the tokenizer files again."
        ) from None


def check_vocabulary(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer whose tokens go beyond the model's embedding.

    Raises:
        ModelError: It does.
    """
    if tokenizer is None:
        return
    rows, tokens = config.get_text_config().vocab_size, len(tokenizer)
    if tokens > rows:
        raise ModelError(
            f"the tokenizer has {tokens} tokens and the model's embedding {rows} rows.",
            where=str(tokenizer.name_or_path),
            fix="Use the tokenizer of this model, or first save the model with resize_token_embeddings applied.",
        )
