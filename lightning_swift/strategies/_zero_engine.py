"""Starts DeepSpeed's engine on any device, CPU ranks over gloo included, and takes it off a model again."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._zero_swap import swapping_apart

if TYPE_CHECKING:
    from lightning_swift.strategies._zero_config import DeepSpeedConfig

__all__ = ["choose_accelerator", "inference_config", "release_engine", "start_engine"]

# Under this name a LightningModule remembers the engine whose hooks it carries.
_ENGINE = "_lightning_swift_engine"


def choose_accelerator(device_type: str) -> None:
    """Make DeepSpeed compute on the device that the Trainer has chosen.

    By itself it takes a GPU wherever there is one, also under ``Trainer(accelerator="cpu")``.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device_type:
        return
    if device_type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    elif device_type == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CUDA_Accelerator())
    else:
        raise ConfigurationError(
            f"DeepSpeed is not supported on {device_type!r} devices.",
            where="Trainer(accelerator=...)",
            fix='Use accelerator="gpu" or "cpu".',
        )


def start_engine(
    module: nn.Module, config: DeepSpeedConfig, *, optimizer: Optimizer | None, local_rank: int
) -> tuple[Any, Any]:
    """The engine and its optimizer (None without one) round ``module``.

    An engine that an earlier fit or evaluation left on the module is taken off first: two engines would gather and
    free every parameter twice.
    """
    import deepspeed

    release_engine(module)
    # Without an optimizer nothing is to be trained; a list that is empty says so.
    trainable = [] if optimizer is None else [p for p in module.parameters() if p.requires_grad]
    config, swap = (config, None) if optimizer is None else swapping_apart(config)
    engine, wrapped, _, _ = deepspeed.initialize(
        # The index of a CPU device is None, with which DeepSpeed cannot compare.
        args=Namespace(device_rank=local_rank),
        config=config,
        model=module,
        model_parameters=trainable,
        optimizer=optimizer,
        lr_scheduler=None,
        dist_init_required=False,
    )
    if swap is not None:
        swap.remove_after(wrapped)
    # Not as an attribute that would make the engine a child of its own child.
    module.__dict__[_ENGINE] = engine
    return engine, wrapped


def release_engine(module: nn.Module) -> None:
    """Take the engine of an earlier run off the module: its hooks only, since others' hooks must stay."""
    engine = module.__dict__.pop(_ENGINE, None)
    if engine is None:
        return
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        handle.remove()
    engine.destroy()
    # Collected as garbage some time later it would do it again, to what a newer engine has put there.
    engine.optimizer = None


def inference_config(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """What of a training configuration an engine without an optimizer needs: precision, and partitioned parameters."""
    kept: DeepSpeedConfig = {key: config[key] for key in ("bf16", "data_types") if key in config}
    kept["train_micro_batch_size_per_gpu"] = 1
    zero = config["zero_optimization"]
    if zero["stage"] == 3:
        # What is about optimizers would start swapping that nothing uses.
        kept["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return kept
