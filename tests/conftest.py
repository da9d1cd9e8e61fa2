"""Settings for every test: one thread, no network, no leftovers in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# The allocator of pyarrow starts a thread, which does not survive in the ranks that are forked from a server with it.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

import pytest

from tests.harness.kernels import background_build, wait_for_kernels
from tests.harness.ranks import run_ranks

# Their tests take seconds each, those of the other folders mostly milliseconds.
_HEAVY = {"recipes", "tensor_pipeline", "zero"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each of two workers begin with long tests, and share short ones at the end, where one would wait else.

    A worker is given a half of all tests in this order, and takes the last ones of the other's when it has none left.
    """
    heavy = [i for i in items if _HEAVY & set(i.path.parts) or i.get_closest_marker("slow")]
    # What needs kernels waits for them less if it comes later.
    heavy.sort(key=lambda item: "ops" in getattr(item, "fixturenames", ()))
    half = len(heavy) // 2
    # What the tests of one file share is made once.
    while 0 < half < len(heavy) and heavy[half].path == heavy[half - 1].path:
        half += 1
    first, chosen = heavy[:half], set(heavy)
    light = [item for item in items if item not in chosen]
    middle = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *light[:middle], *heavy[half:], *light[middle:]]


def _warm() -> None:
    """Nothing: the first call starts the server and loads what it preloads."""


@pytest.fixture(scope="session", autouse=True)
def warm_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the forkserver once, so that no single test pays for it, and the compiler where kernels are needed."""
    items = request.session.items
    if not any({"parallel", "checkpoint", "faults", "zero"} & set(item.path.parts) for item in items):
        yield
        return
    run_ranks(_warm, 1, deadline=120)
    if any("ops" in getattr(item, "fixturenames", ()) for item in items):
        with background_build():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def ops() -> None:
    """What every test that starts an engine of DeepSpeed needs, before any deadline of its own."""
    wait_for_kernels()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that writes into the working directory."""
    before = set(os.listdir())
    yield
    # What pytest and mypy make for themselves.
    assert not {name for name in set(os.listdir()) - before if not name.startswith(".")}


@pytest.fixture(autouse=True)
def unchanged_environment() -> object:
    """Fail a test that leaves a changed environment behind."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    # pytest's own bookkeeping, what Lightning sets for its rank-zero helpers, and where torch keeps compiled kernels
    # (noted when an optimizer's first step imports its compiler).
    allowed = {"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "TORCHINDUCTOR_CACHE_DIR"}
    assert not changed - allowed, sorted(changed)
