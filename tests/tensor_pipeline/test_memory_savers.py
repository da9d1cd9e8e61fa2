"""Activation checkpointing and compiled blocks change no number of a run, under stages and cut layers."""

from __future__ import annotations

from typing import Any

from lightning_swift.callbacks import ActivationCheckpointing
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.ranks import ranks
from tests.tensor_pipeline.runs import FullModule, Numbers, plain, train
from tests.tensor_pipeline.test_fit import BOTH, FIVE_DECIMALS, LAYERS, PP2

CASES: list[tuple[dict[str, Any], str | None]] = [
    ({**PP2, "schedule": "ZBVZeroBubble"}, "full"),
    ({**BOTH, "sequence_parallel": True, "self_check": False}, "selective"),
    ({**PP2, "compile": "aot_eager"}, "full"),
    ({**BOTH, "compile": "aot_eager", "self_check": False}, None),
    ({**PP2, "cpu_offload": True}, None),
]


def test_numbers_stay_the_same() -> None:
    on_four_ranks(plain("llama", layers=LAYERS))


@ranks(4, deadline=90)
def on_four_ranks(expected: Numbers) -> None:
    for options, mode in CASES:
        callbacks = [] if mode is None else [ActivationCheckpointing(mode)]  # type: ignore[arg-type]
        strategy = TensorPipelineStrategy("32-true", **options)
        found = train(FullModule("llama", layers=LAYERS), strategy, callbacks=callbacks)
        errors = [abs(a - b) for a, b in zip(found.flat(), expected.flat(), strict=True)]
        assert max(errors) <= FIVE_DECIMALS, (options, mode, found, expected)
