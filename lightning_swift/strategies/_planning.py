"""Turns a Trainer with its strategy and module into the planner's question, for predictions about a run."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.planner.hardware import GPU, detect
from lightning_swift.planner.settings import Goal, Job, Layout, Offload, Precision, StrategyName
from lightning_swift.planner.shape import ModelShape, read_shape

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["find_shape", "local_device", "own_choices", "question"]

_NAMES = {
    "DDPBF16Strategy": "ddp",
    "FSDPBF16Strategy": "fsdp",
    "TensorPipelineStrategy": "tp_pp",
    "ZeROStrategy": "zero",
    "ZeRO3QLoRAStrategy": "zero",
}


def local_device() -> GPU:
    """The GPU of this machine; the processor with the host's memory where there is none."""
    if torch.cuda.is_available():
        return detect()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Rates of a server processor; only comparisons between plans matter here.
    return GPU(
        key="cpu",
        name="CPU",
        memory_mib=memory / 2**20,
        tflops=1.0,
        bandwidth=50.0,
        pcie=50.0,
        nvlink=0.0,
        peer_to_peer=True,
        bfloat16=True,
        network=1.0,
        host_memory=memory / 1e9,
        per_node=1,
    )


def find_shape(module: pl.LightningModule) -> ModelShape | None:
    """Sizes of the language model of ``module``, built or not; None if it has none that the planner knows."""
    configs: list[Any] = [
        getattr(module, "config", None),
        *(getattr(part, "config", None) for part in module.modules()),
    ]
    for config in configs:
        if hasattr(config, "to_dict") and hasattr(config, "model_type"):
            try:
                return replace(read_shape(config.to_dict()), name=str(config.model_type))
            except (ModelError, ConfigurationError):
                continue
    return None


def own_choices(module: pl.LightningModule) -> dict[str, Any]:
    """Loss and optimizer of a ``CausalLM`` as fields of a :class:`Job`; nothing for another module."""
    if not isinstance(module, CausalLM):
        return {}
    options = module.hparams
    return {"loss": options["loss"], "chunk": options["loss_chunk"], "optimizer": options["optimizer"]}


def question(trainer: pl.Trainer, module: pl.LightningModule, batch: int, length: int) -> tuple[Job, Layout] | None:
    """What the planner would be asked about this run; None for a strategy or model that it does not know.

    Args:
        trainer: With one of the strategies of this package.
        module: Its module.
        batch: Sequences per rank and micro-batch.
        length: Tokens of each.
    """
    strategy: Any = trainer.strategy
    kind = next((_NAMES[c.__name__] for c in type(strategy).__mro__ if c.__name__ in _NAMES), None)
    shape = find_shape(module)
    if kind is None or shape is None:
        return None
    options = getattr(strategy, "options", None)
    adapters: Any = getattr(options, "adapters", None) or getattr(strategy, "adapters", None)
    lora = getattr(adapters, "lora", None)
    goal = "full" if lora is None else "qlora" if adapters.quantization == "nf4" else "lora"
    job = Job(
        shape,
        local_device(),
        gpus=max(1, trainer.world_size // trainer.num_nodes),
        nodes=trainer.num_nodes,
        length=length,
        goal=cast(Goal, goal),
        precision=_precision(strategy, options),
        lora_r=16 if lora is None else lora.r,
        dora=lora is not None and lora.dora,
        dropout=lora is not None and lora.dropout > 0,
        **own_choices(module),
    )
    return job, _layout(trainer, strategy, options, kind, batch)


def _precision(strategy: Any, options: Any) -> Precision:
    policy = getattr(options, "policy", None) or strategy.policy
    return cast(Precision, policy.name)


def _layout(trainer: pl.Trainer, strategy: Any, options: Any, kind: str, batch: int) -> Layout:
    settings = getattr(strategy, "activation_checkpointing", None)
    mode = "none" if settings is None else "full" if settings.mode == "every_n" else settings.mode
    world = trainer.world_size
    common: dict[str, Any] = {
        "batch": batch,
        "accumulate": trainer.accumulate_grad_batches,
        "checkpointing": mode,
    }
    if kind == "ddp":
        return Layout("ddp", replicate=world, **common)
    if kind == "zero":
        stage = cast(StrategyName, f"zero{options.stage or 3}")
        return Layout(stage, shard=world, offload=_offload(options), **common)
    sizes = options.sizes(world, trainer.num_nodes)
    layout = Layout(
        cast(StrategyName, kind),
        shard=sizes.dp_shard,
        replicate=sizes.dp_replicate,
        tensor=sizes.tp,
        pipeline=sizes.pp,
        offload="cpu" if options.cpu_offload else "none",
        **common,
    )
    return layout if kind == "fsdp" else _with_schedule(layout, options, sizes)


def _with_schedule(layout: Layout, options: Any, sizes: Any) -> Layout:
    schedule = options.scheduled(sizes)
    return replace(
        layout,
        schedule=schedule.name,
        microbatches=min(schedule.microbatches, layout.batch),
        virtual=schedule.stages_per_rank,
        sequence=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
    )


def _offload(options: Any) -> Offload:
    if options.offload_optimizer == "nvme":
        return "nvme"
    if options.offload_params == "cpu":
        return "cpu"
    return "optimizer" if options.offload_optimizer == "cpu" else "none"
