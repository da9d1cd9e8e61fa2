"""Options that cannot work are refused with what to do: at construction, by the number of ranks, or by the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_swift.errors import ConfigurationError, DataError, ModelError
from lightning_swift.parallel.checkpointing import CheckpointingSettings
from lightning_swift.parallel.dtypes import PrecisionPolicy
from lightning_swift.parallel.mesh import MeshSizes, build_mesh
from lightning_swift.parallel.sharding import ShardingSettings, sharded_roots, would_only_copy
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer, tiny_config
from tests.harness.ranks import ranks
from tests.pipeline.references import full

AT_CONSTRUCTION: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
    ({"pipeline_parallel_size": "two"}, "pipeline_parallel_size='two'"),
    ({"microbatches": 0}, "microbatches=0"),
    ({"microbatches": True}, "microbatches=True"),
    ({"schedule": "Chimera"}, "Chimera"),
    ({"pipeline_parallel_size": 4, "microbatches": 2}, "at least as many microbatches"),
    ({"pipeline_parallel_size": 2, "schedule": "DualPipeV", "microbatches": 3}, "DualPipeV needs"),
    ({"pipeline_parallel_size": 2, "schedule": "1F1B", "virtual_stages": 2}, "one stage per rank"),
    ({"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 3}, "two stages per rank"),
    ({"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B", "microbatches": 5}, "does not divide"),
    ({"schedule": "ZBVZeroBubble", "reshard_after_forward": True}, "have been freed"),
    ({"stage_balance": []}, "stage_balance=\\[\\]"),
    ({"stage_balance": [3, 0]}, "number of layers of each stage"),
    ({"loss_fn": "nowhere.at.all"}, "cannot be imported"),
    ({"loss_fn": "math.pi"}, "not a function"),
    ({"compile": "unknown"}, "not a backend"),
    ({"quantization": "nf4"}, "quantization"),
    ({"precision": "16-mixed"}, "precision='16-mixed'"),
]


@pytest.mark.parametrize(("options", "message"), AT_CONSTRUCTION, ids=lambda value: str(value)[:40])
def test_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TensorPipelineStrategy(**options)


BY_RANKS: list[tuple[dict[str, Any], int, str]] = [
    ({"pipeline_parallel_size": 3}, 8, "is not the number of ranks, 8"),
    ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_shard": 4}, 8, "pp=2 x tp=2"),
    ({"tensor_parallel_size": 1, "sequence_parallel": True}, 8, "sequence_parallel=True"),
    ({"tensor_parallel_size": 1, "loss_parallel": True}, 8, "loss_parallel=True"),
    ({"pipeline_parallel_size": 2, "stage_balance": [1, 2, 3]}, 8, "3 entries for 2 stages"),
]


@pytest.mark.parametrize(("options", "world", "message"), BY_RANKS, ids=lambda value: str(value)[:40])
def test_refused_by_the_number_of_ranks(options: dict[str, Any], world: int, message: str) -> None:
    strategy = TensorPipelineStrategy(**options)
    # The Trainer does this as it is built, before there is a process group.
    strategy.parallel_devices = [torch.device("cpu")] * world
    strategy.cluster_environment = L.fabric.plugins.environments.LightningEnvironment()
    with pytest.raises(ConfigurationError, match=message):
        strategy.set_world_ranks()


@pytest.mark.parametrize(
    ("options", "world", "nodes", "expected"),
    [
        ({}, 8, 1, MeshSizes(tp=8)),
        ({}, 32, 4, MeshSizes(pp=4, tp=8)),
        ({"tensor_parallel_size": 2}, 16, 2, MeshSizes(pp=2, dp_shard=4, tp=2)),
        ({"tensor_parallel_size": 2, "data_parallel_shard": 2}, 16, 2, MeshSizes(pp=4, dp_shard=2, tp=2)),
        ({"pipeline_parallel_size": 2}, 8, 1, MeshSizes(pp=2, tp=4)),
        ({"pipeline_parallel_size": 2, "data_parallel_shard": 2}, 8, 1, MeshSizes(pp=2, dp_shard=2, tp=2)),
        ({"pipeline_parallel_size": 2, "data_parallel_replicate": 2}, 8, 1, MeshSizes(pp=2, dp_replicate=2, tp=2)),
        (
            {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "data_parallel_replicate": "auto"},
            8,
            1,
            MeshSizes(dp_shard=4, tp=2),
        ),
    ],
    ids=str,
)
def test_sizes_that_are_left_open(options: dict[str, Any], world: int, nodes: int, expected: MeshSizes) -> None:
    assert TensorPipelineStrategy(**options).options.sizes(world, nodes) == expected


class Headed(UserModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.value = nn.Linear(4, 1)


class Two(UserModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.other = UserModule("llama")
        self.other.configure_model()


class NoLanguageModel(L.LightningModule):
    def configure_model(self) -> None:
        self.model = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Compiled(UserModule):
    """Compiled by the user: in place, or wrapped."""

    def __init__(self, *, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped

    def configure_model(self) -> None:
        super().configure_model()
        if self.wrapped:
            self.model = torch.compile(self.model, backend="eager")
        else:
            self.model.compile(backend="eager")


class Regularised(UserModule):
    """Its loss has a term of the parameters, which is logged over all ranks or only returned."""

    def __init__(self, *, logged: bool) -> None:
        super().__init__()
        self.logged = logged

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())
        if self.logged:
            self.log("whole", loss, sync_dist=True)
        return {"loss": loss}


PP2 = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
TP2 = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of the user's own that picks elements out of the vocabulary."""
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:, None])
    return -(chosen * (1 - chosen.exp())).mean()


BY_MODEL: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: UserModule("llama", layers=1), PP2, "1 layers cannot fill 2"),
    (lambda: UserModule("llama", layers=3), {**PP2, "schedule": "ZBVZeroBubble"}, "3 layers cannot fill 4"),
    (lambda: UserModule("llama", layers=4), {**PP2, "stage_balance": [1, 2]}, "does not give 4 layers"),
    (lambda: UserModule("gpt2"), TP2, "plan"),
    (lambda: Headed("llama"), PP2, "would train beside the language model"),
    (lambda: Two("llama"), PP2, "2 Hugging Face models"),
    (NoLanguageModel, PP2, "no Hugging Face model"),
    (lambda: Compiled(wrapped=True), PP2, "compiled as a whole"),
    (lambda: Compiled(wrapped=False), TP2, "compiled as a whole"),
    (lambda: Regularised(logged=True), PP2, "computed from the parameters"),
    (lambda: Regularised(logged=False), PP2, "computed from the parameters"),
    (lambda: Regularised(logged=True), {**PP2, "cpu_offload": True}, "computed from the parameters"),
]


@ranks(2)
def test_refused_by_the_model() -> None:
    for make, options, message in BY_MODEL:
        trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **options), max_steps=1)
        with pytest.raises((ModelError, ConfigurationError), match=message):
            trainer.fit(make(), loader(Tokens(8), batch_size=4))
    trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **PP2), callbacks=[WeightAveraging()])
    with pytest.raises(ConfigurationError, match="WeightAveraging averages into a copy"):
        trainer.fit(UserModule(), loader(Tokens(8), batch_size=4))
    trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **TP2), detect_anomaly=True)
    with pytest.raises(ConfigurationError, match="detect_anomaly=True looks at gradients"):
        trainer.fit(UserModule(), loader(Tokens(8), batch_size=4))
    cut_loss = TensorPipelineStrategy("32-true", **TP2, loss_parallel=True, loss_fn=focal, self_check=False)
    with pytest.raises(RuntimeError, match="failed to run forward") as failure:
        quiet_trainer(strategy=cut_loss, max_steps=1).fit(UserModule(), loader(Tokens(8), batch_size=4))
    assert "loss_fn cannot compute with logits that are cut along the vocabulary" in str(failure.value.__cause__)
    strategy = TensorPipelineStrategy("32-true", **TP2, compile="aot_eager")
    strategy.activation_checkpointing = CheckpointingSettings()
    with pytest.raises(ConfigurationError, match="cannot compile the recomputation"):
        quiet_trainer(strategy=strategy, max_steps=1).fit(UserModule(), loader(Tokens(8), batch_size=4))
    compare_batches()
    compare_factors()
    start_from_one_tied_weight()
    keep_random_batches_together()
    keep_masks_of_cut_layers_together()


def compare_batches() -> None:
    for rows in (0, 8):
        # Rows of this rank's own: what a sampler over all ranks gives.
        shifted = Tokens(16)
        shifted.x = shifted.x.roll(torch.distributed.get_rank() * rows, 0)
        trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **PP2), max_steps=1)
        if rows:
            with pytest.raises(DataError, match=r"different batches: ranks \[0, 1\]"):
                trainer.fit(UserModule(), loader(shifted, batch_size=4))
        else:
            trainer.fit(UserModule(), loader(shifted, batch_size=4))
            assert trainer.global_step == 1


class Unseeded(UserModule):
    """Random weights that are different on each rank."""

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModelForCausalLM

            torch.manual_seed(torch.distributed.get_rank())
            self.model = AutoModelForCausalLM.from_config(tiny_config("qwen3")).train()


def start_from_one_tied_weight() -> None:
    module = Unseeded()
    trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **PP2), max_steps=3)
    trainer.fit(module, loader(Tokens(32), batch_size=4))
    weight = full(module.model.stages[0].pretrained.get_input_embeddings().weight).detach()
    other = weight.clone()
    torch.distributed.broadcast(other, src=0)
    # Both copies have had the same sum of gradients and the same steps.
    assert torch.equal(weight, other)
    shard_where_it_changes_something(module.model, trainer.strategy.device_mesh)


def shard_where_it_changes_something(model: torch.nn.Module, stages: DeviceMesh) -> None:
    assert not sharded_roots(model)
    plain = ShardingSettings(PrecisionPolicy("32-true"))
    assert would_only_copy(model, stages, plain)
    for needed in (
        replace(plain, cpu_offload=True),
        ShardingSettings(PrecisionPolicy("bf16-true")),
        ShardingSettings(PrecisionPolicy("bf16-mixed")),
    ):
        assert not would_only_copy(model, stages, needed)
    for sizes in (MeshSizes(pp=1, dp_replicate=2), MeshSizes(pp=1, dp_shard=2), MeshSizes(pp=1, tp=2)):
        assert not would_only_copy(model, build_mesh(sizes, "cpu"), plain)
    # A frozen model that was loaded in BF16 under adapters in FP32.
    next(model.parameters()).requires_grad_(False).data = torch.ones(1, dtype=torch.bfloat16)
    assert not would_only_copy(model, stages, plain)


class Weighs(UserModule):
    """Weighs the loss of each rank by something of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + torch.distributed.get_rank())


def compare_factors() -> None:
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1}
    trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **sizes), max_steps=1)
    with pytest.raises(ModelError, match="multiplied with 1 on one rank and 2 on another"):
        trainer.fit(Weighs(), loader(Tokens(8), batch_size=4))


class Consumes(UserModule):
    """Draws random numbers of its own on one rank, as dropout does on one stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1 + torch.distributed.get_rank())
        self.seen.append(batch["input_ids"][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def keep_random_batches_together() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    module = Consumes()
    module.seen = []
    trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **PP2), max_steps=8)
    trainer.fit(module, torch.utils.data.DataLoader(Tokens(16), batch_size=4, shuffle=True))
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, module.seen)
    assert everyone[0] == everyone[1]
    assert everyone[0][:4] != everyone[0][4:]


class DropsOut(Consumes):
    """Drops out of what all tensor-parallel ranks hold whole."""

    def configure_model(self) -> None:
        super().configure_model()
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.2


def keep_masks_of_cut_layers_together() -> None:
    # And what else can be asked of a model that has been cut.
    torch.manual_seed(torch.distributed.get_rank())
    module = DropsOut("gpt_neox")
    module.seen = []
    strategy = TensorPipelineStrategy("32-true", pipeline_parallel_size=1, tensor_parallel_size=2)
    quiet_trainer(strategy=strategy, max_steps=2).fit(module, loader(Tokens(16), batch_size=4))
    mine = dict(module.named_parameters())["model.gpt_neox.layers.0.input_layernorm.weight"].full_tensor().detach()
    first = mine.clone()
    torch.distributed.broadcast(first, src=0)
    assert torch.equal(mine, first)
    assert module.model.dtype == torch.float32
    assert module.model.generation_config.eos_token_id == 2
    with pytest.raises(AttributeError, match=r"no attribute 'gpt_neox', .* its own stages"):
        module.model.gpt_neox.layers  # noqa: B018
