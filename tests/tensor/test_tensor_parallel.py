"""Tensor parallelism over two ranks gives the loss and every gradient of the single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_swift.errors import ModelError
from lightning_swift.parallel.tensor import (
    TensorParallelReport,
    TensorParallelSettings,
    apply_tensor_parallel,
    check_tensor_parallel,
)
from tests.harness.ranks import ranks
from tests.tensor.cases import batch, compare, cut, maker, tp_mesh

SEQUENCE = TensorParallelSettings(sequence_parallel=True, loss_parallel=True)
# Whose numbers are in the matrix of layouts.
KINDS = ("llama", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt_neox", "mixtral", "qwen3_moe")


def check_report(kind: str, report: TensorParallelReport, *, sequence: bool) -> None:
    model = maker(kind)()
    # Ends and blocks are cut; what is left is norms, routers and biases.
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(numbers.get(name, 0) for name in report.replicated) < 0.05 * sum(numbers.values())
    partial = {name.rsplit(".", 2)[-2] for name in report.partial}
    in_heads = {"q_norm", "k_norm"} & {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    assert in_heads <= partial
    if not sequence:
        assert partial == in_heads
    else:
        assert {"input_layernorm", "post_attention_layernorm"} <= partial
        assert ("gate" in partial) == (kind in ("mixtral", "qwen3_moe"))


@ranks(2)
def check_reports() -> None:
    for kind in KINDS:
        for sequence in (False, True):
            reports = []
            for self_check in (False, True):
                settings = TensorParallelSettings(sequence_parallel=sequence, self_check=self_check)
                model = maker(kind)()
                check_tensor_parallel(model, 2, settings)
                if self_check:
                    reports.append(apply_tensor_parallel(model, tp_mesh(), settings))
                    continue
                # The 175B layout is checked in a process group that carries nothing. Gemma's embedding has a buffer,
                # which torch replicates.
                with counting() as mode:
                    reports.append(apply_tensor_parallel(model, tp_mesh(), settings))
                assert mode.get_total_counts() == len(list(model.get_input_embeddings().buffers())), kind
            # The rule alone gives the same answer where the plan names everything.
            assert reports[0] == reports[1], kind
            check_report(kind, reports[0], sequence=sequence)
            assert all(isinstance(p, DTensor) for n, p in model.named_parameters() if n in reports[0].sharded)


def test_what_is_cut_and_whose_gradients_are_partial() -> None:
    check_reports()


@ranks(2)
def check_accumulation() -> None:
    # Two batches: what transformers does for q_norm and k_norm counts the first one twice.
    for settings in (TensorParallelSettings(), SEQUENCE):
        compare(maker("qwen3"), settings, batches=[batch(), batch(seed=4)])


def test_gradients_of_two_batches_add_up() -> None:
    check_accumulation()


@ranks(4)
def check_four() -> None:
    # Phi-3 gathers its projections, so two key/value heads do for four ranks. One expert for each rank of Qwen3-MoE.
    compare(maker("phi3"), size=4)
    compare(maker("phi3"), SEQUENCE, size=4)
    plan = {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    norms = {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_norm", "k_norm")}
    compare(maker("qwen3_moe"), TensorParallelSettings(plan={**plan, **norms}), size=4)


def test_four_ranks() -> None:
    check_four()


@ranks(2)
def check_communication() -> None:
    reductions = {}
    for sequence in (False, True):
        model = maker("llama")()
        cut(model, tp_mesh(), TensorParallelSettings(sequence_parallel=sequence))
        with counting() as forward:
            loss = model(**batch(), use_cache=False).loss
        with counting() as backward:
            loss.backward()
        reductions[sequence] = (count(forward), count(backward))
    # Embedding, two layers of attention and MLP: a sum each. The head gathers. Backward: one sum for each block,
    # not one for each linear layer, and one for the head.
    assert reductions[False] == ({"all_reduce": 5, "all_gather": 1}, {"all_reduce": 5})
    forward_counts, _ = reductions[True]
    # A gather before and a scattered sum after each block, and the gather before the head.
    assert forward_counts["reduce_scatter"] == 4


def counting() -> CommDebugMode:
    return CommDebugMode()  # type: ignore[no-untyped-call]


def count(mode: CommDebugMode) -> dict[str, int]:
    found: dict[str, int] = {}
    for operation, number in mode.get_comm_counts().items():
        name = str(operation).split(".")[-1].removesuffix("_into_tensor").removesuffix("_tensor")
        found[name] = found.get(name, 0) + number
    return found


def test_blocks_communicate_once() -> None:
    check_communication()


@ranks(2)
def check_lengths() -> None:
    model = maker("llama")()
    cut(model, tp_mesh(), SEQUENCE)
    with pytest.raises(ModelError, match="length 13 cannot be cut over 2 ranks"):
        model(**batch(length=13), use_cache=False)


def test_a_length_that_does_not_divide() -> None:
    check_lengths()


@ranks(2)
def check_frozen() -> None:
    def make() -> Any:
        model = maker("qwen3")()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name)
        return model

    for settings in (TensorParallelSettings(), SEQUENCE):
        report = compare(make, settings)
        assert all("layers.1." in name for name in report.partial)


def test_frozen_layers() -> None:
    check_frozen()


@ranks(2)
def check_bfloat16() -> None:
    # The self-check computes in float32 whatever the model is in.
    model = maker("llama")().to(torch.bfloat16)
    cut(model, tp_mesh(), SEQUENCE)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_bfloat16_models() -> None:
    check_bfloat16()
