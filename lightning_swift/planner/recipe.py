"""Writes a candidate as a recipe that ``lightning-swift fit --config`` accepts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner.search import Candidate
from lightning_swift.planner.settings import Job, Layout

__all__ = ["class_name", "recipe_text", "strategy_arguments", "write_recipe"]

_CLASSES = {
    "ddp": "DDPBF16Strategy",
    "fsdp": "FSDPBF16Strategy",
    "zero1": "ZeROStrategy",
    "zero2": "ZeROStrategy",
    "zero3": "ZeROStrategy",
    "tp_pp": "TensorPipelineStrategy",
}


_RUN = "runs/planned"
# Where the recipe says that the fast local disk is.
_NVME = "/local_nvme"


def class_name(job: Job, layout: Layout) -> str:
    """The strategy class of a layout."""
    if layout.strategy == "zero3" and job.goal == "qlora" and layout.offload == "cpu":
        return "ZeRO3QLoRAStrategy"
    return _CLASSES[layout.strategy]


def strategy_arguments(job: Job, layout: Layout) -> dict[str, Any]:
    """Arguments of that class, plain values (``lora`` as the fields of :class:`LoraSettings`)."""
    arguments: dict[str, Any] = {"precision": job.precision}
    if layout.strategy.startswith("zero"):
        arguments |= _zero(job, layout)
    elif layout.strategy == "fsdp":
        arguments |= {"data_parallel_shard": layout.shard, "data_parallel_replicate": layout.replicate}
        arguments |= {"cpu_offload": True} if layout.offload == "cpu" else {}
    elif layout.strategy == "tp_pp":
        arguments |= _tensor_pipeline(layout)
    if not job.trains_all:
        arguments["lora"] = {"r": job.lora_r, "alpha": float(2 * job.lora_r), "dora": job.dora}
        arguments["lora"] |= {"dropout": 0.05} if job.dropout else {}
    if job.goal == "qlora" and class_name(job, layout) != "ZeRO3QLoRAStrategy":
        arguments["quantization"] = "nf4"
    return arguments


def _zero(job: Job, layout: Layout) -> dict[str, Any]:
    if class_name(job, layout) == "ZeRO3QLoRAStrategy":
        return {"offload_optimizer": "cpu", "offload_params": "cpu"}
    offloads = {
        "none": {},
        "optimizer": {"offload_optimizer": "cpu"},
        "cpu": {"offload_optimizer": "cpu", "offload_params": "cpu"},
        "nvme": {"offload_optimizer": "nvme", "nvme_path": _NVME},
    }
    return {"stage": int(layout.strategy.removeprefix("zero")), **offloads[layout.offload]}


def _tensor_pipeline(layout: Layout) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "data_parallel_shard": layout.shard,
        "data_parallel_replicate": layout.replicate,
    }
    if layout.tensor > 1:
        arguments |= {"sequence_parallel": layout.sequence, "loss_parallel": layout.loss_parallel}
    if layout.pipeline > 1:
        arguments |= {"schedule": layout.schedule, "microbatches": layout.microbatches}
    return arguments


def _recipe(job: Job, layout: Layout, model: str) -> dict[str, Any]:
    callbacks: list[dict[str, Any]] = []
    if layout.checkpointing != "none":
        callbacks.append(_object("callbacks.ActivationCheckpointing", {"mode": layout.checkpointing}))
    saves = {"dirpath": f"{_RUN}/checkpoints", "every_n_train_steps": 100, "save_top_k": 2}
    callbacks += [_object("callbacks.ShardedCheckpoint", saves), _object("callbacks.MemoryReport", {})]
    return {
        "seed_everything": 1,
        "model": _object("CausalLM", _model(job, model)),
        "data": _object("ChatDataModule", _data(job, layout)),
        "trainer": {
            "accelerator": "gpu",
            "devices": job.gpus,
            "num_nodes": job.nodes,
            "strategy": _object(class_name(job, layout), strategy_arguments(job, layout)),
            "max_epochs": 1,
            "accumulate_grad_batches": layout.accumulate,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 10,
            "default_root_dir": _RUN,
            "callbacks": callbacks,
        },
    }


def _model(job: Job, model: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"path_or_config": _folder(model), "lr": 2e-5 if job.trains_all else 2e-4}
    if job.optimizer != "adamw":
        settings["optimizer"] = job.optimizer
    if job.loss == "chunked":
        settings |= {"loss": "chunked", "loss_chunk": job.chunk}
    if not job.trains_all and job.precision != "32-true":
        # Frozen weights keep the type they are read in.
        settings["dtype"] = "bfloat16"
    return settings


def _folder(model: str) -> str:
    """What CausalLM gets: the user's own path, or the place for a model of which only a configuration is shipped."""
    return f"models/{model.lower()}" if not Path(model).expanduser().exists() else model


def _data(job: Job, layout: Layout) -> dict[str, Any]:
    return {"train": "data/train.jsonl", "max_length": job.length, "batch_size": layout.batch, "too_long": "truncate"}


def _object(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_path": f"lightning_swift.{name}", "init_args": dict(arguments)}


def recipe_text(job: Job, candidate: Candidate, model: str) -> str:
    """The recipe as YAML.

    Args:
        job: What is trained.
        candidate: How.
        model: What ``CausalLM(path_or_config=...)`` gets.
    """
    import yaml

    memory = candidate.memory
    peak = f"{memory.low / 1e9:.1f} to {memory.high / 1e9:.1f} GB per GPU (peak at {memory.where})"
    notes = [
        f"Planned for {job.world} x {job.gpu.name}: {job.goal} training of {job.shape.name}, {job.length} tokens.",
        f"predicted: {peak}, {memory.host / 1e9:.0f} GB of host memory per machine",
    ]
    notes += _to_do(job, candidate.layout, model)
    header = "".join(f"# {note}\n" for note in notes)
    text: str = yaml.safe_dump(_recipe(job, candidate.layout, model), sort_keys=False)
    return header + text


def _to_do(job: Job, layout: Layout, model: str) -> list[str]:
    """What the user has to see to before the recipe can run, and what it does not do as it was predicted."""
    notes = ['Put conversations (one JSON object with "messages" a line) at data/train.jsonl, or change the paths.']
    if not Path(model).expanduser().exists():
        weights = "" if job.goal == "pretrain" else "safetensors, "
        notes.append(f"Put the model's folder (config.json, {weights}tokenizer) at {_folder(model)}.")
    elif not Path(model).expanduser().is_dir() and job.goal != "pretrain":
        notes.append(
            f"Weights are random: {model} is a configuration. Give a model's folder to start from its weights."
        )
    if layout.offload == "nvme":
        notes.append(f"nvme_path: change {_NVME} to a folder on a fast local disk.")
    if job.loss == "huggingface_kept":
        notes.append("Predicted for a module that keeps the model's output; CausalLM drops it and needs less.")
    if job.optimizer_in_backward:
        notes.append("Predicted for an optimizer in the backward pass; CausalLM has none and needs more.")
    notes.append(f"A Hugging Face folder is made by: lightning-swift export {_RUN}/checkpoints/step-N.ckpt OUTPUT")
    return notes


def write_recipe(path: Path, text: str) -> None:
    """Write the recipe to a file.

    Raises:
        ConfigurationError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot be written ({error}).", where=f"--output {path}") from error
