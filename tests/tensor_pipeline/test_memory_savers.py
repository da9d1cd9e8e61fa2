"""Activation checkpointing and compiled blocks change no number of a run, under stages and cut layers."""

from __future__ import annotations

from typing import Any

from lightning_swift.callbacks import ActivationCheckpointing
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.ranks import ranks
from tests.tensor_pipeline.runs import SHORT, FullModule, Numbers, plain, train
from tests.tensor_pipeline.test_fit import FIVE_DECIMALS, LAYERS, PP2, TP2

# How layers are cut has its own tests.
CUT = {**TP2, "self_check": False}
CASES: list[tuple[dict[str, Any], str | None]] = [
    ({**PP2, "schedule": "ZBVZeroBubble"}, "full"),
    ({**CUT, "sequence_parallel": True}, "selective"),
    ({**PP2, "compile": "aot_eager"}, "full"),
    ({**CUT, "compile": "aot_eager"}, None),
    ({**CUT, "compile": "aot_eager", "sequence_parallel": True}, "selective"),
    ({**PP2, "cpu_offload": True}, None),
]


def test_numbers_stay_the_same() -> None:
    on_two_ranks({layers: plain("llama", layers=layers, **SHORT) for layers in (2, LAYERS)})


@ranks(2)
def on_two_ranks(references: dict[int, Numbers]) -> None:
    for options, mode in CASES:
        # A V has two stages on each rank; elsewhere more layers would be compiled in the same way.
        layers = LAYERS if options.get("schedule") == "ZBVZeroBubble" else 2
        expected = references[layers]
        callbacks = [] if mode is None else [ActivationCheckpointing(mode)]  # type: ignore[arg-type]
        strategy = TensorPipelineStrategy("32-true", **options)
        found = train(FullModule("llama", layers=layers), strategy, callbacks=callbacks, **SHORT)
        errors = [abs(a - b) for a, b in zip(found.flat(), expected.flat(), strict=True)]
        assert max(errors) <= FIVE_DECIMALS, (options, mode, found, expected)
