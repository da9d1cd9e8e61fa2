"""Builds and fills models under ZeRO so that no rank holds more of them than it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_swift.strategies._zero_config import DeepSpeedConfig

__all__ = ["known_to_transformers", "loading_config"]


def loading_config(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """The configuration while the model is being built, when sizes that follow from the model are not known yet."""
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    return {**config, "zero_optimization": zero}


@contextmanager
def known_to_transformers(config: DeepSpeedConfig) -> Iterator[None]:
    """While active, transformers and peft know that this process runs ZeRO with ``config``.

    ``from_pretrained`` then partitions each parameter as it makes it (without, it fails on empty shapes), ``generate``
    keeps ranks together, and peft gathers what it reads. Outside, ``from_pretrained`` is an ordinary one: an export
    that one rank verifies alone must not wait for the others.
    """
    from transformers.integrations import deepspeed as integration

    # transformers holds a weak reference only.
    known: Any = integration.HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        integration.unset_hf_deepspeed_config()
        del known
