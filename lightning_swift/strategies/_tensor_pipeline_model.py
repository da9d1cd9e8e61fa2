"""Replaces the causal language model of a LightningModule by this rank's stages of it, under the same names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.anatomy import Anatomy, probe
from lightning_swift.parallel.mesh import MeshAxis, MeshSizes
from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.parallel.schedule import ScheduleSettings
from lightning_swift.parallel.stages import Stage, balance, cut, stage_shares
from lightning_swift.parallel.tensor import check_tensor_parallel, tensor_parallel_context
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel, adapter_configs
from lightning_swift.strategies._tensor_pipeline_options import TensorPipelineOptions, load_loss

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "Pipeline",
    "add_idle_parameter",
    "check_trainer",
    "copies_of_tied_weights",
    "plan_pipeline",
    "put_pipeline",
    "saved_model",
    "share_tied_weights",
    "stages_of",
    "without_idle",
]

_IDLE = "idle"


@dataclass(frozen=True)
class Pipeline:
    """How a model is dealt out; the same on all ranks.

    Args:
        path: Attribute path of the ``PreTrainedModel`` in the LightningModule, and then of what takes its place.
        anatomy: Its parts.
        schedule: Order of the microbatches.
        sizes: The mesh.
        bounds: First layer and the one after the last of each stage, first stage first.
        shares: Share of each stage in the estimated cost of the model.
        parameters: Number of parameters of each stage.
        tied: Whether embedding and head are one weight, which both ends of the pipeline then hold.
    """

    path: str
    anatomy: Anatomy
    schedule: ScheduleSettings
    sizes: MeshSizes
    bounds: tuple[tuple[int, int], ...]
    shares: tuple[float, ...]
    parameters: tuple[int, ...]
    tied: bool


def plan_pipeline(module: pl.LightningModule, sizes: MeshSizes, options: TensorPipelineOptions) -> Pipeline:
    """Decide how the model of ``module`` is dealt out. Changes nothing and communicates nothing.

    Raises:
        ModelError: The module has no causal language model, several, or trains something besides; the model cannot
            be split into so many stages or cut over so many ranks.
    """
    path, model = _find_causal_lm(module)
    _refuse_other_parameters(module, path)
    _refuse_compiled(path, model)
    if sizes.tp > 1:
        check_tensor_parallel(model, sizes.tp, options.tensor)
    anatomy = probe(model)
    schedule = options.scheduled(sizes)
    bounds = balance(model, anatomy, schedule.n_stages(sizes.pp), options.stage_balance)
    shares = stage_shares(model, anatomy, bounds)
    return Pipeline(
        path,
        anatomy,
        schedule,
        sizes,
        tuple(bounds),
        tuple(shares),
        _parameters(model, anatomy, bounds),
        _is_tied(model),
    )


def check_trainer(trainer: pl.Trainer, sizes: MeshSizes) -> None:
    """Refuse what a Trainer is asked for and a model in parts cannot do.

    Raises:
        ConfigurationError: A callback that copies the module before it is cut and matches copy and original by their
            order; anomaly detection with tensor parallelism.
    """
    if trainer._detect_anomaly and sizes.tp > 1:
        raise ConfigurationError(
            "detect_anomaly=True looks at gradients by an operator that torch 2.13 does not have for cut layers.",
            where="Trainer",
            fix="Leave it out, or look with tensor_parallel_size=1: stages and shards can be looked at.",
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ConfigurationError(
                f"{type(callback).__name__} averages into a copy of the whole model, of which each rank has a part.",
                where="callbacks",
                fix="Average saved checkpoints instead, or use a strategy that does not cut the model.",
            )


def put_pipeline(
    module: pl.LightningModule,
    pipeline: Pipeline,
    mesh: DeviceMesh,
    options: TensorPipelineOptions,
    *,
    device: torch.device,
) -> PipelinedModel:
    """Put this rank's stages, which compute on ``device``, in the place of the model."""
    owner, name = _owner(module, pipeline.path)
    model = getattr(owner, name)
    axis = mesh[MeshAxis.PP]
    numbers = pipeline.schedule.stage_ids(axis.get_local_rank(), axis.size())
    training = model.training
    pipelined = PipelinedModel(
        cut(model, pipeline.anatomy, pipeline.bounds, numbers),
        group=axis.get_group(),
        schedule=pipeline.schedule,
        length_multiple=pipeline.sizes.tp if options.sequence_parallel else 1,
        activation_dtype=options.policy.compute_dtype,
        step_context=lambda: tensor_parallel_context(options.tensor),
        loss_fn=load_loss(options.loss_fn),
        gather_logits=options.gather_logits,
        device=device,
    )
    pipelined.train(training)
    setattr(owner, name, pipelined)
    return pipelined


def stages_of(pipelined: PipelinedModel) -> list[Stage]:
    """The stages of this rank, first one first."""
    return [stage for stage in pipelined.stages if isinstance(stage, Stage)]


@torch.no_grad()
def share_tied_weights(pipelined: PipelinedModel, pipeline: Pipeline, mesh: DeviceMesh, device: torch.device) -> None:
    """Give the last stage's copies of tied weights the values of the first stage's.

    Ranks that make random weights without a common seed hold different ones. Empty weights are read from one folder.
    """
    count, pp = len(pipeline.bounds), pipeline.sizes.pp
    ends = [pipeline.schedule.rank_of(number, pp) for number in (0, count - 1)]
    if ends[0] == ends[1]:
        # The one rank has copied it when it cut the model.
        return
    group = mesh.get_group(MeshAxis.PP)
    for stage in stages_of(pipelined):
        for name in stage.tied if stage.first or stage.last else ():
            weight = stage.pretrained.get_parameter(name)
            if weight.is_meta:
                continue
            if stage.first:
                dist.send(weight.detach().to(device), group=group, group_dst=ends[1])
            else:
                received = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                dist.recv(received, group=group, group_src=ends[0])
                weight.copy_(received)


def copies_of_tied_weights(pipelined: PipelinedModel, pipeline: Pipeline) -> frozenset[nn.Parameter]:
    """The parameters of this rank of which the first stage holds the original."""
    if not pipeline.tied or len(pipeline.bounds) == 1:
        return frozenset()
    last = (stage for stage in stages_of(pipelined) if stage.last)
    return frozenset(stage.pretrained.get_parameter(name) for stage in last for name in stage.tied)


def add_idle_parameter(pipelined: PipelinedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give a rank on whose stages nothing trains one parameter that never has a gradient.

    ``configure_optimizers`` runs on every rank, and no optimizer of torch can be built over nothing.
    """
    if not any(parameter.requires_grad for parameter in pipelined.parameters()):
        pipelined.register_parameter(_IDLE, nn.Parameter(torch.zeros(1, dtype=dtype, device=device)))


def without_idle(state: Mapping[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """``state`` without what it has of the parameter of :func:`add_idle_parameter`, which no other layout knows."""
    return {name: value for name, value in state.items() if f".{pipeline.path}.{_IDLE}." not in name}


def saved_model(module: nn.Module, pipelined: PipelinedModel, pipeline: Pipeline) -> HuggingFaceModel:
    """The Hugging Face model with the config that is saved, and its path in the whole module."""
    stage = stages_of(pipelined)[0]
    wrapper: nn.Module | None = stage.model
    path = pipeline.path
    if wrapper is stage.pretrained:
        wrapper, path = _wrapper_around(module, pipeline.path)
    adapters = adapter_configs(wrapper) if hasattr(wrapper, "peft_config") else None
    return HuggingFaceModel(path, stage.pretrained, adapters)


def _wrapper_around(module: nn.Module, path: str) -> tuple[nn.Module | None, str]:
    """The outermost peft wrapper above ``path``, which the user has made, and its path."""
    names = path.split(".")
    for length in range(1, len(names)):
        outer = module.get_submodule(".".join(names[:length]))
        if hasattr(outer, "get_base_model"):
            return outer, ".".join(names[:length])
    return None, path


def _parameters(model: Any, anatomy: Anatomy, bounds: list[tuple[int, int]]) -> tuple[int, ...]:
    counts = [sum(p.numel() for p in layer.parameters()) for layer in model.get_submodule(anatomy.layers)]
    for place, names in ((0, anatomy.before), (-1, anatomy.after)):
        counts[place] += sum(p.numel() for name in names for p in model.get_submodule(name).parameters())
    return tuple(sum(counts[start:end]) for start, end in bounds)


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _find_causal_lm(module: pl.LightningModule) -> tuple[str, Any]:
    found = _pretrained(module)
    heads = [(path, model) for path, model in found if model.get_output_embeddings() is not None]
    if len(found) != 1 or len(heads) != 1:
        what = f"{len(found)} Hugging Face models" if found else "no Hugging Face model"
        raise ModelError(
            f"the LightningModule holds {what}, {len(heads)} of them with a language model head.",
            where=type(module).__name__,
            fix="Tensor and pipeline parallelism train one causal language model of transformers, built in "
            "configure_model or __init__; FSDPBF16Strategy takes any module.",
        )
    return heads[0]


def _pretrained(module: nn.Module, prefix: str = "") -> list[tuple[str, Any]]:
    """The outermost models of transformers below ``module``, also those inside peft's wrapper, with their paths."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    found: list[tuple[str, Any]] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        found += [(path, child)] if isinstance(child, PreTrainedModel) else _pretrained(child, f"{path}.")
    return found


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    outer, _, name = path.rpartition(".")
    return module.get_submodule(outer), name


def _refuse_compiled(path: str, model: nn.Module) -> None:
    # torch.compile wraps the model under this name; model.compile() leaves a call that was traced for the whole.
    if "_orig_mod" in path.split(".") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ModelError(
            "the model has been compiled as a whole, and is to be cut.",
            where=type(model).__name__,
            fix='Leave that out and give the strategy compile="inductor", which compiles each block.',
        )


def _refuse_other_parameters(module: nn.Module, path: str) -> None:
    others = [name for name, p in module.named_parameters() if not name.startswith(f"{path}.") and p.requires_grad]
    if others:
        raise ModelError(
            f"{', '.join(others[:3])} would train beside the language model, whose loss alone is differentiated.",
            where=type(module).__name__,
            fix="Freeze or remove them, or use FSDPBF16Strategy.",
        )
