"""The closed form against the real layer code under fake tensors, and that against real tensors."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner.memory import requested_peak
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.trace import extend, run_requests, trace_layout, trace_request
from tests.planner.jobs import job, tiny

# What issue and README promise: 5 % at worst. The two engines share no code, and every case here is far closer.
_WORST = 0.02
# The promise for FSDP2. A tied embedding in a tiny model is 2.9 % off.
_WORST_SHARDED = 0.03
_PURE: dict[str, Any] = {"precision": "bf16-true", "optimizer": "adamw_fused"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Layout]] = {
    "full": (tiny(), {"length": 1024, **_PURE}, Layout("ddp")),
    "mixed": (tiny(), {"length": 1024, "optimizer": "adamw"}, Layout("ddp", batch=2)),
    "kept": (tiny(), {"length": 512, "loss": "huggingface_kept", **_PURE}, Layout("ddp", checkpointing="full")),
    "chunked": (tiny(), {"length": 2048, "loss": "chunked", "chunk": 256}, Layout("ddp", checkpointing="selective")),
    "lora": (tiny(), {"length": 1024, "goal": "lora"}, Layout("ddp")),
    "qlora": (tiny(), {"length": 1024, "goal": "qlora", **_PURE}, Layout("ddp", checkpointing="full")),
    "dropout": (tiny(), {"length": 1024, "goal": "lora", "dropout": True}, Layout("ddp", checkpointing="selective")),
    "tied": (tiny(tie_word_embeddings=True), {"length": 1024}, Layout("ddp")),
    "qwen2": (tiny(model_type="qwen2"), {"length": 1024, **_PURE}, Layout("ddp")),
    "qwen3": (tiny(model_type="qwen3", head_dim=64), {"length": 1024}, Layout("ddp", checkpointing="full")),
    "gemma2": (tiny(model_type="gemma2", head_dim=32, tie_word_embeddings=True), {"length": 1024}, Layout("ddp")),
    "gemma3": (tiny(model_type="gemma3_text", head_dim=32), {"length": 1024, **_PURE}, Layout("ddp")),
    "fsdp": (tiny(), {"length": 1024, "gpus": 8}, Layout("fsdp", shard=8)),
    "fsdp tied": (tiny(tie_word_embeddings=True), {"length": 256, "gpus": 8}, Layout("fsdp", shard=8)),
    "fsdp lora": (tiny(), {"length": 1024, "gpus": 8, "goal": "lora"}, Layout("fsdp", shard=8, checkpointing="full")),
}


def question(name: str) -> tuple[dict[str, Any], Job, Layout]:
    config, changes, layout = CASES[name]
    return config, job(config, **changes), layout


@pytest.fixture(scope="module")
def traced() -> dict[str, float]:
    requests = []
    for name in CASES:
        config, asked, layout = question(name)
        requests.append(trace_request(config, asked, layout, layers=asked.shape.layers))
    return {name: max(result["sections"].values()) for name, result in zip(CASES, run_requests(requests), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_closed_form(traced: dict[str, float], name: str) -> None:
    _, asked, layout = question(name)
    worst = _WORST_SHARDED if layout.strategy == "fsdp" else _WORST
    assert requested_peak(asked, layout) == pytest.approx(traced[name], rel=worst)


@pytest.mark.slow
def test_real_tensors_take_what_fake_ones_do() -> None:
    config = tiny()
    requests = []
    for layout in (Layout("ddp"), Layout("ddp", checkpointing="full")):
        asked = job(config, length=256, precision="32-true", optimizer="adamw_fused")
        requests += [trace_request(config, asked, layout, layers=2, fake=fake) for fake in (True, False)]
    peaks = [max(result["sections"].values()) for result in run_requests(requests)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    assert peaks[2] == pytest.approx(peaks[3], rel=0.02)


@pytest.mark.slow
def test_two_and_three_layers_tell_the_rest_of_an_unknown_architecture() -> None:
    config = tiny(model_type="olmo2", num_hidden_layers=7)
    asked = job(config, length=512, **_PURE)
    assert not asked.shape.known
    layout = Layout("ddp", checkpointing="full")
    extended = trace_layout(config, asked, layout)
    (whole,) = run_requests([trace_request(config, asked, layout, layers=7)])
    # Memory is linear in equal layers; what is left are the few bytes that are rounded to 512.
    assert extended.requested == pytest.approx(max(whole["sections"].values()), rel=1e-3)


@pytest.mark.slow
def test_stages_of_a_pipeline() -> None:
    # Of a size that is cut into stages: in a stage of 20 MB the few tensors that are not modelled are 3.5 %.
    config = tiny(num_hidden_layers=8, hidden_size=2048, intermediate_size=5504, vocab_size=32000)
    asked = job(config, gpus=4, length=2048, **_PURE)
    layout = Layout("tp_pp", batch=8, pipeline=4, microbatches=8, checkpointing="full")
    from lightning_swift.planner.buffers import buffers
    from lightning_swift.planner.states import share

    requests = [trace_request(config, asked, layout, layers=2, stage=stage) for stage in range(4)]
    for stage, result in enumerate(run_requests(requests)):
        # Weights that FSDP2 keeps gathered are not in this trace.
        closed = requested_peak(asked, layout, stage) - buffers(asked, layout, share(asked, layout, stage)).always
        assert closed == pytest.approx(max(result["sections"].values()), rel=0.03)


def test_sections_are_extended_along_a_line() -> None:
    found = extend([{"loss": 20, "between": 5}, {"loss": 25, "between": 9}], [2, 3], 10)
    assert found == {"loss": 60.0}


def test_what_only_the_closed_form_covers_is_said() -> None:
    asked = job(tiny(), gpus=2)
    with pytest.raises(ConfigurationError, match="ZeRO"):
        trace_request(tiny(), asked, Layout("zero2", shard=2), layers=2)
