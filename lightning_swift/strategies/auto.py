"""``recommend`` and ``swift_auto``: the planner chooses the strategy, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.errors import ModelError
from lightning_swift.parallel.checkpointing import CheckpointingSettings
from lightning_swift.planner.calibration import read_calibration
from lightning_swift.planner.hardware import GPU, read_gpu
from lightning_swift.planner.recipe import class_name, strategy_arguments
from lightning_swift.planner.recommend import plan_for, refusal, why
from lightning_swift.planner.search import Candidate, Limits
from lightning_swift.planner.settings import Goal, Job, Precision
from lightning_swift.planner.shape import ModelShape, read_shape
from lightning_swift.strategies._planning import find_shape, local_device, own_choices

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["AutoStrategy", "recommend"]

AnyGoal = Goal | Literal["auto"]


def recommend(
    model: str | Path | dict[str, Any],
    devices: int = 1,
    *,
    num_nodes: int = 1,
    gpu: str = "auto",
    goal: AnyGoal = "auto",
    max_length: int = 2048,
    batch_size: int | None = None,
    precision: Precision = "bf16-mixed",
) -> Strategy:
    """The strategy to train ``model`` with, configured; the reason is printed.

    Activation checkpointing that the plan needs is set on it; an ``ActivationCheckpointing`` callback overrides that.

    Args:
        model: A model folder, a ``config.json``, its content, or the name of a shipped configuration.
        devices: GPUs per machine.
        num_nodes: Machines.
        gpu: ``"a10"`` and the like, a YAML file, or ``"auto"`` for this machine's.
        goal: ``"full"``, ``"pretrain"``, ``"lora"`` or ``"qlora"``; ``"auto"`` takes the first that fits.
        max_length: Tokens per sequence.
        batch_size: Sequences per rank and micro-batch; None assumes what the plan would choose.
        precision: As every strategy takes it.

    Raises:
        ConfigurationError: Nothing fits; the nearest plan that does is named.
    """
    device = local_device() if gpu == "auto" else read_gpu(gpu)
    job = _job(read_shape(model), device, devices, num_nodes, max_length, precision)
    return _build(*_choose(job, goal, batch_size))


def _job(shape: ModelShape, gpu: GPU, devices: int, num_nodes: int, max_length: int, precision: Precision) -> Job:
    return Job(shape, gpu, gpus=devices, nodes=num_nodes, length=max_length, precision=precision)


def _choose(job: Job, goal: AnyGoal, batch_size: int | None) -> tuple[Job, Candidate]:
    limits = Limits(batch=batch_size, ratio=read_calibration(job.gpu.name).ratio)
    job = job if goal == "auto" else replace(job, goal=goal)
    plan = plan_for(job, limits, any_goal=goal == "auto")
    if plan.best is None:
        raise refusal(plan, limits)
    rank_zero_info("%s", why(plan))
    return plan.job, plan.best


def _build(job: Job, candidate: Candidate) -> Strategy:
    import lightning_swift

    arguments = strategy_arguments(job, candidate.layout)
    if "lora" in arguments:
        arguments["lora"] = LoraSettings(**arguments["lora"])
    strategy: Any = getattr(lightning_swift, class_name(job, candidate.layout))(**arguments)
    if candidate.layout.checkpointing != "none":
        strategy.activation_checkpointing = CheckpointingSettings(candidate.layout.checkpointing)
    return cast(Strategy, strategy)


class AutoStrategy(DDPStrategy):
    """Asks the planner when the Trainer gets its model, and hands over to the strategy that it recommends.

    Also by name: ``Trainer(strategy="swift_auto")``. Afterwards this object is the chosen strategy.

    Args:
        goal: As in :func:`recommend`.
        max_length: Tokens per sequence; by default that of the data module, or 2048.
        batch_size: Sequences per rank; by default that of the data module, or 1.
        precision: As every strategy takes it.
    """

    loads_lazy_weights = True

    def __init__(
        self,
        goal: AnyGoal = "auto",
        *,
        max_length: int | None = None,
        batch_size: int | None = None,
        precision: Precision = "bf16-mixed",
    ) -> None:
        super().__init__()
        self._goal = goal
        self._max_length = max_length
        self._batch_size = batch_size
        self._wanted_precision = precision
        self.chosen_by_name = False

    @override
    def connect(self, model: pl.LightningModule) -> None:
        chosen: Any = self._recommend(model.trainer, model)
        self._hand_over(chosen)
        _become(self, chosen)
        self.connect(model)

    def _recommend(self, trainer: pl.Trainer, model: pl.LightningModule) -> Strategy:
        shape = find_shape(model)
        if shape is None:
            raise ModelError(
                "the module has no configuration of a decoder language model before it is built.",
                where="swift_auto",
                fix="Name a strategy, or give the module a property `config`, as CausalLM has.",
            )
        data = getattr(trainer, "datamodule", None)
        length = self._max_length or _whole(data, "max_length") or 2048
        batch = self._batch_size or _whole(data, "batch_size") or 1
        job = _job(shape, local_device(), self.num_processes, self.num_nodes, length, self._wanted_precision)
        job = replace(job, **own_choices(model))
        return _build(*_choose(job, self._goal, batch))

    def _hand_over(self, chosen: Any) -> None:
        """Give the chosen strategy what the Trainer gave to this one, in the Trainer's order."""
        chosen.chosen_by_name = self.chosen_by_name
        chosen.accelerator = self.accelerator
        chosen.parallel_devices = self.parallel_devices
        chosen.cluster_environment = self.cluster_environment
        chosen.num_nodes = self.num_nodes
        chosen._layer_sync = self._layer_sync
        chosen._launcher = self._launcher
        if self._precision_plugin is not None:
            chosen.precision_plugin = self._precision_plugin
        if self._checkpoint_io is not None:
            chosen.checkpoint_io = self._checkpoint_io
        chosen.set_world_ranks()


def _become(strategy: Strategy, chosen: Strategy) -> None:
    """Turn ``strategy`` into ``chosen``, before the Trainer has set anything up on it.

    The model is not known when the Trainer makes its strategy, and the Trainer has no public way to take another one
    later. So the object keeps its identity and takes class and attributes over whole; both objects have the same
    attributes from then on, and it does not matter which of them somebody holds.
    """
    strategy.__class__ = type(chosen)
    strategy.__dict__ = chosen.__dict__


def _whole(data: object, name: str) -> int | None:
    """An option of a data module, wherever it keeps it."""
    for holder in (data, getattr(data, "hparams", None), getattr(data, "_options", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
