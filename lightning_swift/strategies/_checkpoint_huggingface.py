"""The Hugging Face side of a checkpoint: which model it is, and the config and tokenizer files that go with it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn

from lightning_swift.checkpoint.layout import HUGGINGFACE

__all__ = ["HuggingFaceModel", "adapter_configs", "find_model", "tokenizer_of"]

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


class HuggingFaceModel:
    """The one Hugging Face model inside a LightningModule.

    Args:
        path: Its attribute path, or that of the PeftModel around it.
        model: The ``PreTrainedModel``.
        adapters: peft's configs by adapter name as plain JSON, or None.
    """

    def __init__(self, path: str, model: Any, adapters: dict[str, Any] | None) -> None:
        self.path = path
        self.model = model
        self.adapters = adapters

    def write_files(self, directory: Path, tokenizer: Any) -> None:
        """Write config.json, generation_config.json and the tokenizer's files into ``huggingface/``."""
        folder = directory / HUGGINGFACE
        folder.mkdir()
        # As save_pretrained does: inference engines choose the model by it, and from_config does not set it.
        self.model.config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        self.model.config.save_pretrained(folder)
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        else:
            self._copy_tokenizer(folder)
        for entry in folder.iterdir():
            # The format has one level; tokenizers with several chat templates write a folder of them as well.
            if entry.is_dir():
                shutil.rmtree(entry)

    def _copy_tokenizer(self, folder: Path) -> None:
        source = Path(getattr(self.model.config, "_name_or_path", "") or "")
        if source.name and source.is_dir():
            for name in _TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)


def find_model(module: nn.Module) -> HuggingFaceModel | None:
    """The Hugging Face model of ``module``; None if it has none, or several of equal standing."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    models = _outermost(module, PreTrainedModel)
    if len(models) != 1:
        return None
    path, model = models[0]
    wrapped = _peft_model_around(module, path)
    if wrapped is None:
        return HuggingFaceModel(path, model, None)
    return HuggingFaceModel(wrapped[0], model, adapter_configs(wrapped[1]))


def tokenizer_of(module: nn.Module) -> Any:
    """The LightningModule's ``tokenizer`` if it is a transformers tokenizer, else None."""
    tokenizer = getattr(module, "tokenizer", None)
    if tokenizer is None or "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedTokenizerBase

    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def _outermost(module: nn.Module, kind: type) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, child in module.named_children():
        if isinstance(child, kind):
            found.append((_clean(name), child))
        else:
            found += [(f"{_clean(name)}.{path}".strip("."), model) for path, model in _outermost(child, kind)]
    return found


def _clean(name: str) -> str:
    return "" if name == "_orig_mod" else name


def _peft_model_around(module: nn.Module, path: str) -> tuple[str, Any] | None:
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel

    models = [(name, model) for name, model in _outermost(module, PeftModel) if path.startswith(name)]
    return models[0] if models else None


def adapter_configs(model: Any) -> dict[str, Any]:
    """The configs of a peft model by adapter name, as plain JSON."""
    configs = {name: config.to_dict() for name, config in model.peft_config.items()}
    # peft keeps sets and enums of strings in its configs; JSON has neither.
    plain: dict[str, Any] = json.loads(json.dumps(configs, default=_jsonable))
    return plain


def _jsonable(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
