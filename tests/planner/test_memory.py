"""The closed form against published formulas and its own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_swift.planner._arithmetic import Arithmetic
from lightning_swift.planner.activations import StepOptions, profile
from lightning_swift.planner.levers import levers
from lightning_swift.planner.memory import COMPONENTS, predict_memory, requested_peak
from lightning_swift.planner.published import activation_bytes_per_layer
from lightning_swift.planner.search import largest_batch, longest_sequence
from lightning_swift.planner.settings import Layout
from lightning_swift.planner.states import NF4, model_states
from tests.planner.jobs import job, tiny

GB = 1e9


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(stage: int, expected: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters, 64 GPUs, mixed precision Adam."""
    # The paper rounds to one decimal.
    assert model_states(7.5e9, 64, stage) / GB == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("hidden", "heads", "saved"), [(12288, 96, 0.70), (20480, 128, 0.65)])
def test_what_selective_recomputation_saves(hidden: int, heads: int, saved: float) -> None:
    """Korthikanti et al. 2022, section 5: 70 % for GPT-3, 65 % for MT-NLG, both at 2048 tokens."""
    whole = activation_bytes_per_layer(2048, 1, hidden, heads)
    less = activation_bytes_per_layer(2048, 1, hidden, heads, recompute="selective")
    # Two digits are printed there.
    assert 1 - less / whole == pytest.approx(saved, abs=0.006)


def test_a_gpt_layer_keeps_what_korthikanti_count() -> None:
    """34 s b h with selective recomputation, of which 2 are dropout masks; fused attention adds its statistics."""
    question = job("gpt3-175b")
    shape = replace(question.shape, family=replace(question.shape.family, composed_gelu=False))
    step = profile(shape, StepOptions(Arithmetic(), batch=1, length=2048))
    formula = activation_bytes_per_layer(2048, 1, shape.hidden, shape.heads, recompute="selective")
    masks = 2 * 2048 * shape.hidden
    statistics = 2048 * (4 * shape.heads + 2 * 8)
    assert step.layers[False].saved == formula - masks + statistics


def test_full_recomputation_keeps_the_input() -> None:
    shape = job("gpt3-175b").shape
    step = profile(shape, StepOptions(Arithmetic(), batch=1, length=2048, checkpointing="full"))
    assert step.layers[False].saved == activation_bytes_per_layer(2048, 1, 12288, 96, recompute="full")


def test_bytes_of_nf4() -> None:
    """Dettmers et al. 2023: 4.127 bits per parameter with double quantisation."""
    assert pytest.approx(4.127, abs=0.001) == 8 * NF4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3", "tp_pp"])
@pytest.mark.parametrize("goal", ["full", "lora"])
def test_components_add_up(strategy: str, goal: str) -> None:
    shard = 1 if strategy == "ddp" else 8
    memory = predict_memory(job("llama-3-8b", gpus=8, goal=goal), Layout(strategy, shard=shard))
    assert set(memory.components) == set(COMPONENTS)
    assert sum(memory.components.values()) == pytest.approx(memory.peak)
    assert min(memory.components.values()) >= 0
    assert memory.low < memory.peak < memory.high
    assert memory.points[memory.where] == pytest.approx(memory.requested)


def test_the_place_of_the_peak_moves() -> None:
    question = job("llama-3.2-1b", precision="bf16-true")
    assert predict_memory(question, Layout("ddp")).where == "the loss"
    assert predict_memory(replace(question, length=16), Layout("ddp")).where != "the loss"


def test_sharding_offloading_checkpointing_and_chunks_save() -> None:
    question = job("llama-3-8b", gpus=8, length=4096)
    order = [
        predict_memory(question, Layout("ddp", replicate=8)),
        predict_memory(question, Layout("zero1", shard=8)),
        predict_memory(question, Layout("zero2", shard=8)),
        predict_memory(question, Layout("fsdp", shard=8)),
        predict_memory(question, Layout("fsdp", shard=8, offload="cpu")),
        predict_memory(question, Layout("fsdp", shard=8, offload="cpu", checkpointing="selective")),
        predict_memory(question, Layout("fsdp", shard=8, offload="cpu", checkpointing="full")),
        predict_memory(replace(question, loss="chunked"), Layout("fsdp", shard=8, offload="cpu", checkpointing="full")),
    ]
    peaks = [memory.peak for memory in order]
    assert peaks == sorted(peaks, reverse=True)
    assert order[4].host > order[3].host


def test_pipelines_keep_fewer_micro_batches_in_later_stages() -> None:
    question = job("llama-3-8b", gpus=8)
    layout = Layout("tp_pp", batch=16, pipeline=4, microbatches=16)
    first, third = requested_peak(question, layout, 0), requested_peak(question, layout, 2)
    assert first > third
    everything = replace(layout, schedule="GPipe")
    assert requested_peak(question, everything, 0) > first


def test_tensor_and_sequence_parallelism_cut_activations() -> None:
    question = job("llama-3-8b", gpus=8, length=8192)
    whole = predict_memory(question, Layout("tp_pp", shard=8))
    cut = predict_memory(question, Layout("tp_pp", tensor=8))
    more = predict_memory(question, Layout("tp_pp", tensor=8, sequence=True, loss_parallel=True))
    assert whole.peak > cut.peak > more.peak


def test_levers_name_what_they_save() -> None:
    question = job("llama-3-8b", "a10", goal="qlora", length=8192)
    found = levers(question, Layout("ddp", checkpointing="full"))
    assert found[0].name.startswith("compute the loss in chunks")
    # 12 V T bytes of logits and loss become 12 V 1024 and the gradient of the rows.
    assert found[0].saves / GB == pytest.approx(12 * 128256 * (8192 - 1024) / GB, rel=0.1)


def test_longest_sequence_and_largest_batch_are_the_last_that_fit() -> None:
    question, layout = job("llama-3-8b", "a10", goal="qlora"), Layout("ddp", checkpointing="full")
    longest = longest_sequence(question, layout)
    assert longest % 256 == 0
    limit = question.gpu.memory
    assert predict_memory(replace(question, length=longest), layout).peak < limit
    assert predict_memory(replace(question, length=longest + 256), layout).peak > 0.97 * limit
    batch = largest_batch(question, layout)
    assert predict_memory(question, replace(layout, batch=batch)).peak < limit
    assert predict_memory(question, replace(layout, batch=batch + 1)).peak > 0.97 * limit


def test_an_earlier_micro_batch_leaves_its_gradients() -> None:
    question = job("llama-3-8b", gpus=8)
    for name in ("fsdp", "zero2"):
        once, twice = (requested_peak(question, Layout(name, shard=8, accumulate=turns)) for turns in (1, 2))
        assert twice > once
    # Stage 1 keeps FP32 gradients of everything in any case.
    once, twice = (requested_peak(question, Layout("zero1", shard=8, accumulate=turns)) for turns in (1, 2))
    assert twice == once


def test_more_experts_cost_weights_and_not_activations() -> None:
    few, many = (
        requested_peak(
            job(tiny(model_type="mixtral", num_local_experts=n, num_experts_per_tok=2)), Layout("zero3", shard=1)
        )
        for n in (4, 8)
    )
    assert many > few
