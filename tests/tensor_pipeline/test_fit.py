"""A whole Trainer run of an unmodified module gives what plain Lightning gives in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.ranks import ranks
from tests.tensor_pipeline.runs import SHORT, STEPS, FullModule, Numbers, plain, train

# Losses, norms and learning rates to five decimals, as a user would compare two logs. What remains is the order of
# float32 sums over four steps of AdamW.
FIVE_DECIMALS = 5e-6
LAYERS = 4

# As few microbatches as schedules allow: each costs a pass through Python.
PP2 = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "microbatches": 2}
TP2 = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "microbatches": 1}
BOTH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 2}


def assert_equal(strategy: TensorPipelineStrategy, kind: str, expected: Numbers, *, steps: int) -> None:
    found = train(FullModule(kind, layers=LAYERS), strategy, max_steps=steps)
    errors = [abs(a - b) for a, b in zip(found.flat(), expected.first(steps).flat(), strict=True)]
    assert max(errors) <= FIVE_DECIMALS, (strategy.options, found, expected)


# Kind, layouts that run all steps, and layouts whose schedule or cut runs two: the weights of the second are those
# that the first has left.
LAYOUTS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "stages": (
        "llama",
        [PP2, {**PP2, "schedule": "Interleaved1F1B"}, {**PP2, "schedule": "ZBVZeroBubble"}],
        [{**PP2, "schedule": "GPipe", "reshard_after_forward": True}],
    ),
    "stages of a tied model": (
        "qwen3",
        [{**PP2, "data_parallel_replicate": 2}],
        [
            {**PP2, "schedule": "DualPipeV", "microbatches": 4},
            {**PP2, "schedule": "InterleavedZeroBubble"},
            # "auto" makes sixteen microbatches of eight rows.
            {"pipeline_parallel_size": 4, "tensor_parallel_size": 1, "stage_balance": [1, 1, 1, 1]},
        ],
    ),
    "cut layers": ("llama", [BOTH], [{**BOTH, "sequence_parallel": True, "loss_parallel": True}]),
    "cut layers of a tied model": (
        "qwen3",
        [TP2],
        [
            {**BOTH, "schedule": "ZBVZeroBubble", "sequence_parallel": True},
            {**TP2, "sequence_parallel": True, "data_parallel_replicate": 2, "microbatches": 2},
        ],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_that_of_plain_lightning_to_five_decimals(name: str) -> None:
    on_four_ranks(*LAYOUTS[name], plain(LAYOUTS[name][0], layers=LAYERS))


@ranks(4)
def on_four_ranks(kind: str, whole: list[dict[str, Any]], short: list[dict[str, Any]], expected: Numbers) -> None:
    for layouts, steps in ((whole, STEPS), (short, SHORT["max_steps"])):
        for options in layouts:
            assert_equal(TensorPipelineStrategy("32-true", **options), kind, expected, steps=steps)


def test_bfloat16_stays_near_float32() -> None:
    bfloat16_on_four_ranks(plain("llama", layers=LAYERS, **SHORT))


@ranks(4)
def bfloat16_on_four_ranks(expected: Numbers) -> None:
    for options in (PP2, BOTH):
        strategy = TensorPipelineStrategy(**options)
        found = train(module := FullModule("llama", layers=LAYERS), strategy, **SHORT)
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        # bfloat16 has 8 bits, which blurs a loss of 5.5 by less than a thousandth on average, and a norm of squares of
        # small numbers by a hundredth; four steps of AdamW treble that.
        assert found.losses == pytest.approx(expected.losses, abs=3e-3), options
        assert found.norms == pytest.approx(expected.norms, rel=3e-2), options
        assert found.validation == pytest.approx(expected.validation, abs=3e-3), options
