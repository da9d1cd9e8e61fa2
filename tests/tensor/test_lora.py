"""LoRA layers of a model cut over ranks: exact, with dropout, accumulation and sequence parallelism."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_swift.adapters.tensor_parallel import RankedDropout
from lightning_swift.errors import ModelError
from lightning_swift.parallel.tensor import TensorParallelSettings, check_tensor_parallel
from tests.harness.models import tiny_model
from tests.harness.ranks import ranks
from tests.tensor.cases import batch, compare, cut, tp_mesh

PLAIN, SEQUENCE = TensorParallelSettings(), TensorParallelSettings(sequence_parallel=True, loss_parallel=True)


def with_lora(kind: str = "llama", **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_model(kind, layers=2), LoraConfig(**(settings | options)))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            # peft starts at zero, where the gradient of A says nothing.
            nn.init.normal_(parameter, std=0.05)
    return model.train()


@ranks(2)
def check_lora_is_exact(settings: TensorParallelSettings) -> None:
    batches = [batch(), batch(seed=4)]
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for kind, targets in {"llama": "all-linear", "phi3": "all-linear", "qwen3_moe": attention}.items():
        report = compare(partial(with_lora, kind, target_modules=targets), settings, batches=batches)
        assert any("lora_A" in name for name in report.sharded)
        assert any("lora_B" in name for name in report.sharded)
    compare(partial(with_lora, use_rslora=True, target_modules=["q_proj", "down_proj"]), settings, batches=batches)


def test_lora_is_exact() -> None:
    check_lora_is_exact(PLAIN)


def test_lora_is_exact_under_sequence_parallelism() -> None:
    check_lora_is_exact(SEQUENCE)


@ranks(2)
def check_dropout(settings: TensorParallelSettings) -> None:
    mesh = tp_mesh()
    # One column-cut layer: its input is whole on all ranks, so both must drop the same elements. The single process
    # draws the same masks, since they hang on the default generator only.
    torch.manual_seed(5)
    one: dict[str, Any] = {"target_modules": ["q_proj"], "lora_dropout": 0.5}
    whole = with_lora(**one)
    for module in whole.modules():
        if isinstance(module, nn.ModuleDict) and "default" in module and isinstance(module["default"], nn.Dropout):
            module["default"] = RankedDropout(0.5, rank=None)
    compare_seeded(whole, with_lora(**one), settings)
    # A row-cut layer: each rank has its own features, and must not drop the same places.
    model = with_lora(target_modules=["down_proj"], lora_dropout=0.5)
    cut(model, mesh, settings)
    dropout = next(m for m in model.modules() if isinstance(m, RankedDropout))
    torch.manual_seed(5)
    mine = dropout(torch.ones(4, 64))
    masks = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(masks, mine)
    assert not torch.equal(masks[0], masks[1])
    # Between the blocks of a layer a rank has the whole sequence, or a part of its own.
    model = tiny_model("gpt_neox", layers=1).train()
    model.gpt_neox.layers[0].post_mlp_dropout.p = 0.5
    cut(model, mesh, settings)
    torch.manual_seed(5)
    dist.all_gather(masks, model.gpt_neox.layers[0].post_mlp_dropout(torch.ones(4, 64)))
    assert torch.equal(masks[0], masks[1]) != settings.sequence_parallel
    spread = DTensor.from_local(torch.ones(4, 64), mesh, [Replicate()])
    same = RankedDropout(0.5, rank=None)(spread)
    assert isinstance(same, DTensor)
    dist.all_gather(masks, same.to_local())
    assert torch.equal(masks[0], masks[1])
    assert set(masks[0].flatten().tolist()) == {0.0, 2.0}


def compare_seeded(whole: Any, model: Any, settings: TensorParallelSettings) -> None:
    from lightning_swift.parallel.tensor import partial_parameters, sum_partial_gradients
    from tests.tensor.cases import GRADIENT, LOSS, gradients, normalise, relative, step

    mesh = tp_mesh()
    report = cut(model, mesh, settings)
    torch.manual_seed(6)
    expected_loss = step(whole, [batch()])
    torch.manual_seed(6)
    loss = step(model, [batch()], settings)
    sum_partial_gradients(normalise(model), partial_parameters(model, report), mesh.get_group())
    assert abs(loss - expected_loss) < LOSS
    expected, found = gradients(whole), gradients(model)
    assert max(relative(found[name], expected[name]) for name in expected) < GRADIENT


def test_dropout() -> None:
    check_dropout(PLAIN)


def test_dropout_under_sequence_parallelism() -> None:
    check_dropout(SEQUENCE)


def test_dora_is_refused() -> None:
    with pytest.raises(ModelError, match="DoRA"):
        check_tensor_parallel(with_lora(use_dora=True), 2, PLAIN)


def test_a_saved_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"modules_to_save.* cannot be cut"):
        check_tensor_parallel(with_lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), 2, PLAIN)


# peft names patterns for expert weights that this model, of few layers, does not have.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_lora_on_fused_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="LoRA on fused experts"):
        check_tensor_parallel(with_lora("qwen3_moe"), 2, PLAIN)
