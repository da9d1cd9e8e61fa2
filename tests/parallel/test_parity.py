"""Sharded training computes what unsharded training computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import UserModule, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import (
    STEPS,
    Frozen,
    Lora,
    PlainModule,
    Seq2Seq,
    TiedByHand,
    ValueHead,
    fit,
    mean_losses,
    single_process,
)

# Loss after up to 20 steps of AdamW at 5e-3 on a model whose loss moves by 1: float32 sums in another order (over
# ranks, or over tokens of one large batch) differ by 1e-7 at the first step, and training amplifies that.
AFTER_TRAINING = 3e-5
# Largest error of a gradient relative to its largest element; float32 has 1.2e-7, sums over 256 tokens lose a digit.
GRADIENT = 1e-5

MODULES: dict[str, Any] = {
    "llama": lambda: UserModule("llama", layers=2),
    "qwen3 (tied)": lambda: UserModule("qwen3", layers=2),
    "mistral": lambda: UserModule("mistral", layers=2),
    "gemma": lambda: UserModule("gemma", layers=2),
    "gpt2": lambda: UserModule("gpt2", layers=2),
    "frozen": lambda: Frozen("llama", layers=2),
    "plain": PlainModule,
    "nn.Transformer": Seq2Seq,
    "tied by hand": TiedByHand,
    "value head": lambda: ValueHead("qwen3", layers=2),
    "parameter on the module": lambda: ValueHead("llama", direct=True, layers=2),
}
# Those of which the README tells.
LONG = ("llama", "qwen3 (tied)", "mistral", "gemma", "gpt2", "frozen")


@pytest.mark.parametrize("names", [list(MODULES)[:5], list(MODULES)[5:]], ids=["architectures", "modules"])
@ranks(2)
def test_fp32_is_ddp_bit_for_bit_at_two_ranks(names: list[str]) -> None:
    # With two ranks a sum over them has one order only, so nothing may differ at all. What would shows at the second
    # step: a few of the modules train on, to the epoch's end and beyond.
    for name in names:
        steps = STEPS if name in LONG else 6
        ours, recorded = fit(MODULES[name](), FSDPBF16Strategy("32-true"), steps=steps)
        theirs, reference = fit(MODULES[name](), "ddp", steps=steps)
        assert ours.losses == theirs.losses, name
        assert recorded.weights.keys() == reference.weights.keys()
        for parameter, weight in reference.weights.items():
            assert torch.equal(recorded.weights[parameter], weight), f"{name}: {parameter}"


@ranks(2)
def test_options_that_must_not_change_anything_do_not() -> None:
    # A difference would show at the second step; six leave room for one in the moments.
    expected = fit(UserModule(layers=2), FSDPBF16Strategy("32-true"), steps=6)[0].losses
    for options in (
        {"compile": "aot_eager"},
        {"cpu_offload": True},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"block_classes": ["LlamaMLP", "LlamaAttention"]},
        {"reduce_dtype": "float32", "data_parallel_replicate": 2},
    ):
        assert fit(UserModule(layers=2), FSDPBF16Strategy("32-true", **options), steps=6)[0].losses == expected, options


def close(ours: list[float], expected: list[float], tolerance: float = AFTER_TRAINING) -> bool:
    return len(ours) == len(expected) and max(abs(a - b) for a, b in zip(ours, expected, strict=True)) <= tolerance


def assert_gradients(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], prefix: str = "model.") -> None:
    assert ours.keys() == {prefix + name for name in expected}
    for name, gradient in expected.items():
        # Where nothing flows (the first adapter matrix, whose partner starts at zero) both are exactly zero.
        error = (ours[prefix + name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30)
        assert error <= GRADIENT, f"{name}: {error}"


@pytest.mark.parametrize("kinds", [["llama", "qwen3"], ["mistral", "gemma", "gpt2"]], ids="-".join)
@ranks(2)
def test_fp32_is_a_single_process(kinds: list[str]) -> None:
    for kind in kinds:
        module, recorded = fit(UserModule(kind, layers=2), FSDPBF16Strategy("32-true"))
        losses, gradients, _ = single_process(tiny_model(kind, layers=2).train(), world=2)
        assert_gradients(recorded.gradients, gradients)
        assert close(mean_losses(module), losses), kind


@ranks(4)
def test_hybrid_and_full_sharding_on_four_ranks_are_a_single_process() -> None:
    losses, gradients, _ = single_process(tiny_model("qwen3", layers=2).train(), world=4, batch=2)
    for options, steps in (({"data_parallel_replicate": 2}, STEPS), ({}, 6)):
        strategy = FSDPBF16Strategy("32-true", **options)
        module, recorded = fit(UserModule("qwen3", layers=2), strategy, steps=steps, batch=2)
        assert_gradients(recorded.gradients, gradients)
        assert close(mean_losses(module), losses[:steps]), options


# One micro-batch for each step: above.
@pytest.mark.parametrize("accumulate", [2, 4])
@ranks(2)
def test_accumulation_is_a_single_process(accumulate: int) -> None:
    steps = 20 // accumulate
    losses, gradients, _ = single_process(
        tiny_model(layers=2).train(), world=2, steps=steps, accumulate=accumulate, batch=2
    )
    for without_sync in (False, True):
        strategy = FSDPBF16Strategy("32-true", accumulate_without_sync=without_sync)
        module, recorded = fit(UserModule(layers=2), strategy, steps=steps, batch=2, accumulate_grad_batches=accumulate)
        assert_gradients(recorded.gradients, gradients)
        assert close(mean_losses(module), losses), without_sync


@ranks(2)
def test_without_sync_nothing_is_reduced_before_the_last_micro_batch() -> None:
    for without_sync, expected in ((True, 1), (False, 4)):
        module = CountsReductions()
        fit(module, FSDPBF16Strategy(accumulate_without_sync=without_sync), steps=1, accumulate_grad_batches=4)
        assert module.with_gradients == expected, without_sync


class CountsReductions(UserModule):
    """Counts the micro-batches after which the sharded parameters hold a gradient that changed."""

    def __init__(self) -> None:
        super().__init__()
        self.with_gradients = 0
        self.last = 0.0

    def on_after_backward(self) -> None:
        total = sum(float(p.grad.to_local().abs().sum()) for p in self.parameters() if p.grad is not None)
        self.with_gradients += total != self.last
        self.last = total


@ranks(2)
def test_peft_adapters_are_a_single_process() -> None:
    module, recorded = fit(Lora(layers=2), FSDPBF16Strategy("32-true"), steps=8)
    reference = Lora(layers=2)
    reference.configure_model()
    losses, gradients, _ = single_process(reference.model.train(), world=2, steps=8)
    assert gradients
    assert all("lora_" in name for name in gradients)
    assert_gradients(recorded.gradients, gradients)
    assert close(mean_losses(module), losses)
    # peft generates by calling the model inside, past the forward of what is sharded.
    module.model.eval()
    ids = torch.arange(3, 8)[None]
    with torch.no_grad():
        text = module.model.generate(input_ids=ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert text.shape == (1, 9)


@ranks(4)
def test_value_head_and_compile_work_under_hybrid_sharding() -> None:
    expected = fit(ValueHead("llama", direct=True, layers=2), "ddp", steps=8, batch=2)[0]
    for options in ({}, {"compile": "aot_eager"}):
        strategy = FSDPBF16Strategy("32-true", data_parallel_replicate=2, **options)
        module = fit(ValueHead("llama", direct=True, layers=2), strategy, steps=8, batch=2)[0]
        assert close(module.losses, expected.losses), options
