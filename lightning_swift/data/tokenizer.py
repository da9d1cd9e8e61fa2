"""Tokenizers: read from a folder, never from a network, and identified by what they do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_swift.errors import ConfigurationError

__all__ = ["load_tokenizer", "tokenizer_fingerprint"]


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; code that lies in the folder is not run.

    Raises:
        ConfigurationError: If ``folder`` is none or holds no tokenizer.
    """
    where = "ChatDataModule(tokenizer=...)"
    fix = "Give the folder of a model or tokenizer; nothing is downloaded."
    if not Path(folder).is_dir():
        raise ConfigurationError(f"{folder!r} is not a folder.", where=where, fix=fix)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder!r} holds no tokenizer: {error}", where=where, fix=fix) from error
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides a tokenizer's output: its vocabulary and rules, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    parts = [type(tokenizer).__name__, rules, str(tokenizer.special_tokens_map), str(tokenizer.chat_template)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
