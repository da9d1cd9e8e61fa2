"""Builds the configuration that DeepSpeed gets from the strategy's options, a user's own file, and the Trainer.

The base is a template of ``configs/deepspeed`` or the user's configuration, which may hold ``"auto"`` as for the
Hugging Face Trainer. Options and Trainer arguments fill it in; where both say something and differ, both are named
and nothing is trained.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from lightning_swift._shipped import nearest, shipped_folder
from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._zero_checks import AUTO, ZERO, check_keys, check_merged, check_supported, device_of
from lightning_swift.strategies._zero_options import ZeROOptions

__all__ = ["DeepSpeedConfig", "TrainerFacts", "base_config", "complete_config", "hidden_size", "size_buckets"]

DeepSpeedConfig = dict[str, Any]
# Elements. Smaller buckets would cost more in starting messages than they save.
_LEAST_BUCKET = 1 << 20
# Keys that DeepSpeed or Hugging Face read and that configure_optimizers decides here.
_OF_THE_MODULE = {"optimizer": "configure_optimizers", "scheduler": "configure_optimizers"}


@dataclass(frozen=True)
class TrainerFacts:
    """What the Trainer decides and a configuration must not contradict.

    Args:
        world_size: Number of ranks.
        accumulate: Its ``accumulate_grad_batches``.
        clip: Its ``gradient_clip_val``; None if it was not given.
        on_gpu: Whether ranks compute on a GPU.
    """

    world_size: int = 1
    accumulate: int = 1
    clip: float | None = None
    on_gpu: bool = False


def base_config(options: ZeROOptions) -> DeepSpeedConfig:
    """A copy of the user's configuration, or of the shipped template that fits the options.

    Raises:
        ConfigurationError: The file is missing or no JSON object, or asks for what does not work.
    """
    given = options.config
    if given is None:
        config = _read(shipped_folder("configs") / "deepspeed" / f"{_template(options)}.json")
    elif isinstance(given, Mapping):
        config = copy.deepcopy(dict(given))
    else:
        config = _read(_find(str(given)))
    check_keys(config)
    zero = config.setdefault(ZERO, {})
    check_supported(config, zero)
    if given is not None:
        check_merged(zero, options)
    return config


def complete_config(config: DeepSpeedConfig, options: ZeROOptions, facts: TrainerFacts) -> DeepSpeedConfig:
    """Everything but the bucket sizes that follow from the model, which stay ``"auto"``; a new dictionary.

    Raises:
        ConfigurationError: An option or a Trainer argument contradicts a key of ``config``.
    """
    config = copy.deepcopy(config)
    _drop_what_the_module_decides(config)
    _fill_batches(config, facts)
    _fill_precision(config, options)
    _fill_zero(config, options, facts)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def size_buckets(config: DeepSpeedConfig, hidden: int | None) -> None:
    """Replace every ``"auto"`` size by one that follows from the model's hidden size, in place.

    Without one the key is removed, which means DeepSpeed's own default.
    """
    square = None if hidden is None else hidden * hidden
    sizes = {
        "reduce_bucket_size": None if square is None else max(square, _LEAST_BUCKET),
        "stage3_prefetch_bucket_size": None if square is None else max(int(0.9 * square), _LEAST_BUCKET),
        "stage3_param_persistence_threshold": None if hidden is None else 10 * hidden,
    }
    zero = config[ZERO]
    for key in [key for key, value in zero.items() if value == AUTO]:
        size = sizes.get(key)
        if size is None:
            del zero[key]
        else:
            zero[key] = size


def hidden_size(module: nn.Module) -> int | None:
    """Hidden size of the Hugging Face model below ``module``, else the widest matrix's smaller side; None if none.

    Partitioned parameters are taken at their whole shape.
    """
    for part in module.modules():
        size = getattr(getattr(part, "config", None), "hidden_size", None)
        if isinstance(size, int):
            return size
    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in module.parameters()]
    return max((min(shape) for shape in shapes if len(shape) == 2), default=None)


def _template(options: ZeROOptions) -> str:
    name = f"z{options.stage or 3}"
    if options.offload_optimizer == "nvme":
        return f"{name}_nvme"
    if (options.offload_optimizer == "cpu" or options.offload_params == "cpu") and name != "z1":
        return f"{name}_offload"
    return "z3_qlora" if name == "z3" and options.adapters.quantization is not None else name


def _find(given: str) -> Path:
    if Path(given).is_file():
        return Path(given)
    shipped = {path.stem: path for path in (shipped_folder("configs") / "deepspeed").glob("*.json")}
    if given in shipped:
        return shipped[given]
    raise ConfigurationError(
        "neither a file nor the name of a shipped DeepSpeed configuration.",
        where=f"config {given}",
        fix=f"The nearest shipped one is {nearest(given, shipped)!r}: {', '.join(sorted(shipped))}.",
    )


def _read(path: Path) -> DeepSpeedConfig:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"cannot be read ({error}).", where=str(path), fix="Correct the file.") from None
    if not isinstance(config, dict):
        raise ConfigurationError("holds no JSON object.", where=str(path), fix="Correct the file.")
    return cast(DeepSpeedConfig, config)


def _drop_what_the_module_decides(config: DeepSpeedConfig) -> None:
    for key, hook in _OF_THE_MODULE.items():
        section = config.pop(key, None)
        params = section.get("params", {}) if isinstance(section, Mapping) else {}
        fixed = [name for name, value in params.items() if value != AUTO]
        if fixed:
            raise ConfigurationError(
                f"{', '.join(fixed)} would not be used: the LightningModule's {hook} decides.",
                where=f"config: {key}.params",
                fix=f'Remove the section or set its values to "auto", and write them into {hook}.',
            )
    config.pop("fp16", None)


def _fill_batches(config: DeepSpeedConfig, facts: TrainerFacts) -> None:
    accumulate = config.get("gradient_accumulation_steps", AUTO)
    _agree("gradient_accumulation_steps", accumulate, "Trainer(accumulate_grad_batches=...)", facts.accumulate)
    config["gradient_accumulation_steps"] = facts.accumulate
    clip = config.get("gradient_clipping", AUTO)
    if facts.clip is not None or clip == AUTO:
        _agree("gradient_clipping", clip, "Trainer(gradient_clip_val=...)", facts.clip or 0.0)
        config["gradient_clipping"] = float(facts.clip or 0.0)
    _fill_batch_size(config, facts)


def _fill_batch_size(config: DeepSpeedConfig, facts: TrainerFacts) -> None:
    """Of use to DeepSpeed's throughput figures only: what is trained on comes from the DataLoader."""
    whole, micro = (config.pop(key, AUTO) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    parts = facts.world_size * facts.accumulate
    if whole != AUTO and (whole % parts or micro not in (AUTO, whole // parts)):
        raise ConfigurationError(
            f"train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} x {facts.world_size} ranks x "
            f"accumulate_grad_batches={facts.accumulate}.",
            where="config: train_batch_size",
            fix='Set train_batch_size to "auto".',
        )
    config["train_micro_batch_size_per_gpu"] = micro if micro != AUTO else 1 if whole == AUTO else whole // parts


def _fill_precision(config: DeepSpeedConfig, options: ZeROOptions) -> None:
    wanted = options.precision != "32-true"
    bf16 = dict(config.get("bf16", {}))
    # A template's own value is no opinion of the user's.
    given = bf16.get("enabled", AUTO) if options.config is not None else AUTO
    _agree("bf16.enabled", given, f'precision="{options.precision}" of the strategy', wanted)
    config["bf16"] = {**bf16, "enabled": wanted}
    if options.precision == "bf16-true":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    data_types = dict(config.get("data_types", {}))
    accumulate = "bf16" if options.precision == "bf16-true" else "fp32"
    # DeepSpeed's default is the dtype of the model: many small gradients would be lost in BF16 sums.
    if options.config is None or data_types.get("grad_accum_dtype") in (None, AUTO):
        data_types["grad_accum_dtype"] = accumulate
    config["data_types"] = data_types
    if options.config is None or config.get("communication_data_type") in (None, AUTO):
        config["communication_data_type"] = "fp32" if options.reduce_dtype == "float32" else "bfp16"


def _fill_zero(config: DeepSpeedConfig, options: ZeROOptions, facts: TrainerFacts) -> None:
    zero = config[ZERO]
    _agree("stage", zero.get("stage", AUTO), "stage", options.stage, prefix=f"{ZERO}.")
    zero["stage"] = options.stage or zero.get("stage", 3)
    _fill_offload(zero, "offload_optimizer", options, facts)
    _fill_offload(zero, "offload_param", options, facts)
    zero["contiguous_gradients"] = options.contiguous_gradients
    # On the CPU there is no second stream to overlap with.
    zero["overlap_comm"] = facts.on_gpu if options.overlap_comm == AUTO else options.overlap_comm
    sizes = {"reduce_bucket_size": options.reduce_bucket_size, "sub_group_size": options.sub_group_size}
    if zero["stage"] == 3:
        sizes["stage3_prefetch_bucket_size"] = options.prefetch_bucket_size
        sizes["stage3_param_persistence_threshold"] = options.persistence_threshold
    else:
        sizes["allgather_bucket_size"] = options.allgather_bucket_size
    for key, size in sizes.items():
        if size != AUTO:
            _agree(key, zero.get(key, AUTO) if options.config is not None else AUTO, key, size, prefix=f"{ZERO}.")
            zero[key] = size
        elif key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
            zero.setdefault(key, AUTO)


def _fill_offload(zero: dict[str, Any], key: str, options: ZeROOptions, facts: TrainerFacts) -> None:
    wanted = options.offload_optimizer if key == "offload_optimizer" else options.offload_params
    given = device_of(zero, key)
    if options.config is not None and key in zero:
        option = "offload_optimizer" if key == "offload_optimizer" else "offload_params"
        _agree(f"{key}.device", given, option, wanted, prefix=f"{ZERO}.")
    # A template may offload more than was asked for; only a user's own configuration is an answer to None.
    device = wanted or (given if options.config is not None else "none")
    section = dict(zero.pop(key, None) or {})
    if device in ("none", AUTO):
        return
    if options.pin_memory != AUTO:
        section["pin_memory"] = options.pin_memory
    elif options.config is None or section.get("pin_memory", AUTO) == AUTO:
        section["pin_memory"] = facts.on_gpu
    if device == "nvme" and options.nvme_path is not None:
        section["nvme_path"] = options.nvme_path
    zero[key] = {**section, "device": device}


def _agree(key: str, given: object, other: str, value: object, *, prefix: str = "") -> None:
    if given in (AUTO, None) or value is None or given == value:
        return
    raise ConfigurationError(
        f"{prefix}{key}={given!r} of the DeepSpeed configuration contradicts {other}, which is {value!r}.",
        where=f"config: {prefix}{key}",
        fix='Remove the key or set it to "auto".',
    )
