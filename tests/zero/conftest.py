"""The model of the tests of ZeRO."""

from __future__ import annotations

import pytest

from tests.harness.models import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama as a Hugging Face folder: two layers, so that one is gathered while another is computed."""
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "llama", layers=2))
