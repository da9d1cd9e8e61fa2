"""A loss computed in chunks is the model's own, with its gradients, and logits never exist as a whole."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models._chunked_loss import compute_loss_in_chunks
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.models import VOCAB, quiet_trainer, tiny_config, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.test_token_loss import Module, Uneven, check, config, fit, reference

# Divides neither the tokens of a batch nor those of a sequence.
CHUNK = 7
# FP32 sums in another order: of the loss, and relative to the largest gradient of a parameter.
LOSS, GRADIENT = 1e-6, 1e-5


class LargestLogits(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary; weights and their gradients are as high as the model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.rows = hidden, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.shape[-1] == VOCAB:
            rows = result.numel() // VOCAB
            self.rows = max(self.rows, rows if rows != self.hidden else 0)
        return result


def adapted(model: Any, layers: list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False))


def packed() -> dict[str, Tensor]:
    """Two sequences in each of three rows; their first tokens, and some others, are no targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, 12), generator=generator)
    labels = ids.clone()
    labels[:, 6] = labels[0, :5] = labels[2, 8:] = -100
    positions = torch.arange(12).remainder(6).expand(3, 12)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def step(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# Tied and untied heads, capped and scaled logits, biases, decoders inside of decoders, experts, adapters at the head.
KINDS: list[tuple[str, list[str]]] = [
    ("llama", []),
    ("llama", ["q_proj", "lm_head"]),
    ("gemma2", []),
    ("gpt2", []),
    ("opt", []),
    ("phi3", []),
    ("mixtral", []),
]


@pytest.mark.parametrize(("kind", "layers"), KINDS)
def test_it_is_the_models_own_loss(kind: str, layers: list[str]) -> None:
    batch = packed()
    model = tiny_model(kind, hidden=32, layers=2)
    ours = copy.deepcopy(model)
    compute_loss_in_chunks(ours, CHUNK)
    # A copy computes with its own weights.
    ours = copy.deepcopy(ours)
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(model.forward).parameters)
    if layers:
        model, ours = adapted(model, layers), adapted(ours, layers)
    assert torch.equal(ours(batch["input_ids"]).logits, model(batch["input_ids"]).logits)
    expected, gradients = step(model, batch)
    with LargestLogits(32) as largest:
        loss, found = step(ours, batch)
    assert largest.rows == CHUNK
    torch.testing.assert_close(loss, expected, rtol=LOSS, atol=0)
    assert found.keys() == gradients.keys()
    for name, theirs in gradients.items():
        assert (found[name] - theirs).abs().max() <= GRADIENT * theirs.abs().max(), name
    with torch.no_grad():
        total = ours.eval()(**batch, num_items_in_batch=torch.tensor(2.0), use_cache=False).loss
    targets = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(total, expected * targets / 2, rtol=LOSS, atol=0)


def test_what_is_not_the_logits_cross_entropy_is_refused() -> None:
    routed = tiny_config("mixtral", layers=1)
    routed.output_router_logits = True
    from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

    with pytest.raises(ConfigurationError, match="balancing loss of routers"):
        compute_loss_in_chunks(AutoModelForCausalLM.from_config(routed), CHUNK)
    with pytest.raises(ModelError, match="which of its modules"):
        compute_loss_in_chunks(LlamaForSequenceClassification(tiny_config(layers=1)), CHUNK)


def adapted_under_fsdp(**options: Any) -> Module:
    module = Module(config(), **options)
    sampler: Any = DistributedSampler(Uneven(), dist.get_world_size(), dist.get_rank(), shuffle=False)
    strategy = FSDPBF16Strategy("32-true", lora=LoraSettings(r=2))
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, log_every_n_steps=1)
    trainer.fit(module, DataLoader(Uneven(), batch_size=8, sampler=sampler))
    return module


@ranks(2)
def chunked_on_two_ranks() -> None:
    steps = [list(range(16)), list(range(16, 32))]
    gradients, losses = reference("llama", steps)
    chunked: dict[str, Any] = {"loss": "chunked", "loss_chunk": CHUNK}
    # One of the microbatches of 4 sequences has no target at all.
    for name in ("swift_ddp", "fsdp"):
        check(fit("llama", name, batch_size=4, accumulate=2, **chunked), gradients, losses)
    # The weight of the head is the embedding's, and belongs to the outermost group.
    gradients, losses = reference("qwen3", steps)
    check(fit("qwen3", "fsdp", batch_size=8, accumulate=1, **chunked), gradients, losses)
    # A frozen head under adapters, inside of peft's wrapper.
    theirs, ours = adapted_under_fsdp(loss="huggingface"), adapted_under_fsdp(**chunked)
    assert ours.logged == pytest.approx(theirs.logged, rel=LOSS)
    for found, expected in zip(ours.gradients, theirs.gradients, strict=True):
        for name, gradient in expected.items():
            # The first gradient of one of each pair of matrices is 0, since the other is.
            assert (found[name] - gradient).abs().max() <= GRADIENT * gradient.abs().max(), name
    module = Module(config(), **chunked)
    trainer = quiet_trainer(strategy=TensorPipelineStrategy(tensor_parallel_size=2, precision="32-true"))
    with pytest.raises(ConfigurationError, match="cuts the head or the layers"):
        trainer.fit(module, DataLoader(Uneven(), batch_size=8))
    assert module.model is None


def test_sharded_steps_are_those_of_one_process() -> None:
    chunked_on_two_ranks()
