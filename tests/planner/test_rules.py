"""The rules of thumb of the field come out of the search."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner.recommend import plan_for, refusal, why
from lightning_swift.planner.search import Limits, search
from lightning_swift.planner.settings import Job, Layout
from tests.planner.jobs import job


def best(question: Job, **limits: Any) -> Layout:
    plan = search(question, Limits(**limits))
    assert plan.best is not None
    return plan.best.layout


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_few_cards_and_a_small_model_take_ddp(gpus: int) -> None:
    assert best(job("llama-3.2-1b", gpus=gpus)).strategy == "ddp"
    assert best(job("smollm2-135m", "rtx4090", gpus=gpus)).strategy == "ddp"


def test_eight_a100_with_tight_memory_take_fsdp() -> None:
    for gpu in ("a100-40", "a100-80"):
        layout = best(job("llama-3-8b", gpu, gpus=8, length=4096))
        assert (layout.strategy, layout.shard, layout.offload) == ("fsdp", 8, "none")


def test_extreme_memory_pressure_takes_zero3_with_the_host() -> None:
    layout = best(job("llama-3-70b", "a100-40", gpus=8, nodes=4, length=4096))
    assert (layout.strategy, layout.offload) in {("zero3", "optimizer"), ("zero3", "cpu")}


def test_long_sequences_on_a_slow_network_take_checkpointing_with_zero2() -> None:
    # 10 Gbit/s per card, four sequences per card and step.
    question = job("mistral-7b", "a100-80", gpus=1, nodes=8, length=16384, network=1.25e9, global_batch=32)
    order = [candidate.layout for candidate in search(question).candidates]
    assert order[0].strategy == "zero2"
    assert order[0].checkpointing != "none"
    names = [layout.strategy for layout in order]
    assert names.index("zero2") < min(names.index("zero3"), names.index("fsdp"))


def test_over_pcie_whole_layers_go_before_cut_ones() -> None:
    # Activations of long sequences, summed after each half of a layer, take longer on the bus than weights do.
    for goal in ("full", "lora"):
        question = job("llama-3-8b", "l40s", gpus=8, length=16384, goal=goal, loss="chunked")
        names = [candidate.layout.strategy for candidate in search(question).candidates]
        assert names[0] in ("ddp", "fsdp", "zero2")
        assert "tp_pp" not in names[:3]


def test_copies_in_each_machine_keep_gathers_off_the_network() -> None:
    layout = best(job("llama-3.2-3b", "l40s", gpus=8, nodes=2, length=8192, network=0.6e9), strategy="fsdp")
    assert (layout.shard, layout.replicate) == (8, 2)


def test_hundreds_of_billions_take_tensor_pipeline_and_data_parallelism() -> None:
    question = job("gpt3-175b", gpus=8, nodes=1024, goal="pretrain", global_batch=1536)
    layout = best(question)
    assert (layout.strategy, layout.tensor, layout.pipeline, layout.data) == ("tp_pp", 8, 16, 64)


def test_one_a10_takes_qlora() -> None:
    plan = plan_for(job("llama-3-8b", "a10"), any_goal=True)
    assert plan.best is not None
    assert plan.job.goal == "qlora"
    assert "qlora" in why(plan)


def test_rejections_say_why() -> None:
    plan = search(job("llama-3-8b", "a100-40", gpus=8))
    reasons = {item.layout.strategy: item.reason for item in plan.rejected}
    assert "GB of 42.9 GB" in reasons["ddp"]


def test_a_global_batch_is_met_by_accumulation() -> None:
    question = job("llama-3.2-1b", gpus=4, global_batch=64)
    for candidate in search(question).candidates:
        layout = candidate.layout
        assert layout.batch * layout.accumulate * layout.data == 64


def test_what_does_not_fit_names_the_nearest_that_does() -> None:
    plan = search(job("llama-3-70b", "a10", length=4096))
    assert plan.best is None
    error = refusal(plan)
    assert isinstance(error, ConfigurationError)
    assert "does not fit 1 x NVIDIA A10" in str(error)
    assert "nearest plan that fits" in str(error)


def test_cards_without_bf16() -> None:
    plan = search(job("smollm2-135m", "t4"))
    assert plan.best is None
    assert "no BF16" in plan.rejected[0].reason
    assert search(job("smollm2-135m", "t4", precision="32-true")).best is not None


@pytest.mark.parametrize(
    "changes", [{"gpus": 0}, {"nodes": -1}, {"length": 0}, {"lora_r": 0}, {"goal": "best"}, {"host_memory": -1.0}]
)
def test_impossible_questions_are_one_line(changes: dict) -> None:
    with pytest.raises(ConfigurationError) as error:
        job("llama-3-8b", **changes)
    assert "\n" not in str(error.value)
