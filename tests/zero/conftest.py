"""DeepSpeed's kernels are compiled once, before any test that has a deadline, and DeepSpeed is loaded in the server."""

from __future__ import annotations

import pytest

from tests.harness import ranks as harness
from tests.harness.models import save_tiny_model

# A machine that has never run DeepSpeed compiles for two minutes, a busy one for much longer.
BUILD_DEADLINE = 1800.0


def _build() -> None:
    from lightning_swift.strategies._zero_engine import choose_accelerator
    from lightning_swift.strategies._zero_ops import ops_for, prepare_ops

    choose_accelerator("cpu")
    prepare_ops(ops_for(device_type="cpu", offload="cpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Importing it takes longer than most tests; the server is not running yet.
    if any("zero" in item.path.parts for item in items):
        harness._context.set_forkserver_preload([*harness._PRELOAD, "deepspeed"])


@pytest.fixture(scope="session")
def ops() -> None:
    """What every test that starts an engine needs."""
    harness.run_ranks(_build, 1, deadline=BUILD_DEADLINE)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama as a Hugging Face folder."""
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "llama"))
