"""What is wrong with a DeepSpeed configuration of the user's own, said before anything is read or built."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._zero_options import ZeROOptions

__all__ = ["AUTO", "ZERO", "check_keys", "check_merged", "check_supported", "device_of"]

AUTO = "auto"
ZERO = "zero_optimization"
_NUMBERS = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
)
_SECTIONS = ("bf16", "data_types", "fp16", "optimizer", "scheduler", ZERO)
# Of those that are set in practice.
_KNOWN = (
    *_NUMBERS,
    *_SECTIONS,
    "activation_checkpointing",
    "aio",
    "bfloat16",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "steps_per_print",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
# How alike a key must be to a known one to be a misspelling of it.
_ALIKE = 0.85


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse misspelt keys, which DeepSpeed ignores in silence, and values of the wrong kind.

    Raises:
        ConfigurationError: Naming the key.
    """
    for key, value in config.items():
        near = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=_ALIKE)
        if key not in _KNOWN and near:
            raise ConfigurationError(
                "DeepSpeed knows no such key and would ignore it.", where=f"config: {key}", fix=f"Write {near[0]}."
            )
        if key in _SECTIONS and not isinstance(value, Mapping):
            raise ConfigurationError(f"{key} is {value!r}, not an object.", where="config")
        if key in _NUMBERS and value != AUTO and type(value) not in (int, float):
            raise ConfigurationError(f'{key} is {value!r}, neither "auto" nor a number.', where="config")


def check_supported(config: dict[str, Any], zero: dict[str, Any]) -> None:
    """Refuse what does not work whatever the options are."""
    if device_of(zero, "offload_param") == "nvme":
        raise ConfigurationError(
            "offloading parameters to NVMe does not work: DeepSpeed fails at its second step for want of buffers.",
            where=f"config: {ZERO}.offload_param.device",
            fix='Use "cpu"; offload_optimizer may be "nvme".',
        )
    fp16 = config.get("fp16", {})
    if isinstance(fp16, Mapping) and fp16.get("enabled") is True:
        raise ConfigurationError(
            "FP16 is not supported: it needs loss scaling, which BF16 does not.",
            where="config: fp16.enabled",
            fix='Remove the section and choose precision="bf16-mixed" or "32-true" on the strategy.',
        )


def check_merged(zero: dict[str, Any], options: ZeROOptions) -> None:
    """What the options and a user's configuration say together, which each may say alone."""
    if zero.get("stage") in (AUTO, None):
        zero.pop("stage", None)
    stage = options.stage or zero.get("stage", 3)
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ConfigurationError(
            f"{ZERO}.stage={stage!r} is not 1, 2 or 3.",
            where=f"config: {ZERO}.stage",
            fix="Give one of them; without ZeRO, use DDPBF16Strategy.",
        )
    devices = {}
    for key, option in (("offload_optimizer", options.offload_optimizer), ("offload_param", options.offload_params)):
        section = zero.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise ConfigurationError(f"{section!r} is not an object.", where=f"config: {ZERO}.{key}")
        devices[key] = device = option or device_of(zero, key)
        if device not in ("none", "cpu", "nvme"):
            raise ConfigurationError(f"{device!r} is not none, cpu or nvme.", where=f"config: {ZERO}.{key}.device")
    if devices["offload_param"] != "none" and stage != 3:
        raise ConfigurationError(
            f"stage {stage} does not cut parameters up and cannot offload them.",
            where=f"config: {ZERO}.offload_param",
            fix="Use stage 3, or leave it out.",
        )
    path = options.nvme_path or (zero.get("offload_optimizer") or {}).get("nvme_path")
    if devices["offload_optimizer"] == "nvme" and (stage != 3 or path is None):
        raise ConfigurationError(
            "an optimizer on disk needs stage 3 and the path of a folder.",
            where=f"config: {ZERO}.offload_optimizer",
            fix="Use stage 3 and set nvme_path, there or on the strategy.",
        )


def device_of(zero: Mapping[str, Any], key: str) -> str:
    """Where a section of offloading says that something lies."""
    section = zero.get(key)
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"
