"""What a model can take, compared with what the data has, before any weight is read."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from transformers import PreTrainedTokenizerBase

from lightning_swift.errors import ConfigurationError, DataError

__all__ = ["check_context", "check_model", "check_token_ids", "check_vocabulary", "find_config", "require_option"]


def check_model(
    module: LightningModule | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    largest_id: int,
    max_length: int,
    where: str,
) -> None:
    """Run the checks below against the module's Hugging Face config; without one, nothing is known to compare with."""
    config = find_config(module)
    if config is None:
        return
    check_vocabulary(tokenizer, config.vocab_size)
    check_token_ids(largest_id, config.vocab_size, where=where)
    if (context := getattr(config, "max_position_embeddings", None)) is not None:
        check_context(max_length, context)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids beyond an embedding of ``vocab_size`` rows.

    Raises:
        DataError: Naming the first token that has no row.
    """
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= vocab_size)
    if beyond:
        index, token = beyond[0]
        raise DataError(
            f"The tokenizer has {len(beyond)} tokens beyond the model's {vocab_size} embedding rows, "
            f"the first is {token!r} with id {index}.",
            where="tokenizer",
            fix="Use the model's own tokenizer, or resize the embeddings (model.resize_token_embeddings) and save that "
            "model first.",
        )


def check_token_ids(largest_id: int, vocab_size: int, *, where: str) -> None:
    """Refuse data with a token id of ``vocab_size`` or more.

    Raises:
        DataError: Naming the id.
    """
    if largest_id >= vocab_size:
        raise DataError(
            f"Token id {largest_id} is beyond the model's {vocab_size} embedding rows.",
            where=where,
            fix="Use the model's own tokenizer.",
        )


def check_context(max_length: int, context: int) -> None:
    """Refuse records that may be longer than the model's context.

    Raises:
        DataError: Naming both lengths.
    """
    if max_length > context:
        raise DataError(
            f"max_length={max_length} is more than the model's context of {context} tokens.",
            where="max_length",
            fix=f"Set max_length to {context} or less.",
        )


def find_config(module: LightningModule | None) -> Any:
    """The Hugging Face text config of a LightningModule: its own ``config``, or that of its ``model``, or None."""
    for owner in (module, getattr(module, "model", None)):
        config: Any = getattr(owner, "config", None)
        if hasattr(config, "get_text_config"):
            return config.get_text_config()
    return None


def require_option(condition: bool, name: str, value: object, allowed: str) -> None:
    """Refuse an option of the data module unless ``condition`` holds.

    Raises:
        ConfigurationError: Names the option, its value and what is allowed.
    """
    if not condition:
        raise ConfigurationError(
            f"{value!r} is not allowed.", where=f"ChatDataModule({name}=...)", fix=f"Use {allowed}."
        )
