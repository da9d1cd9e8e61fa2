"""The options of the ZeRO strategies as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_swift.adapters.settings import AdapterSettings, LoraSettings, Quantization
from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.dtypes import PrecisionName, PrecisionPolicy, ReduceName
from lightning_swift.parallel.memory import ReturnMemory

__all__ = ["AutoSwitch", "BucketSize", "OptimizerOffload", "ParamOffload", "ZeROOptions", "ZeROStage"]

ZeROStage = Literal[1, 2, 3]
OptimizerOffload = Literal["none", "cpu", "nvme"]
ParamOffload = Literal["none", "cpu"]
BucketSize = int | Literal["auto"]
AutoSwitch = bool | Literal["auto"]


@dataclass(frozen=True)
class ZeROOptions:
    """What a strategy asks of DeepSpeed. :class:`ZeROStrategy` documents each option; None leaves it to ``config``.

    Raises:
        ConfigurationError: A value is not allowed, or two contradict each other.
    """

    precision: PrecisionName = "bf16-mixed"
    stage: ZeROStage | None = None
    offload_optimizer: OptimizerOffload | None = None
    offload_params: ParamOffload | None = None
    nvme_path: str | None = None
    pin_memory: AutoSwitch = "auto"
    overlap_comm: AutoSwitch = "auto"
    contiguous_gradients: bool = True
    reduce_bucket_size: BucketSize = "auto"
    allgather_bucket_size: BucketSize = "auto"
    prefetch_bucket_size: BucketSize = "auto"
    persistence_threshold: BucketSize = "auto"
    sub_group_size: BucketSize = "auto"
    reduce_dtype: ReduceName = "float32"
    lora: LoraSettings | None = None
    quantization: Quantization | None = None
    double_quant: bool = True
    return_freed_memory: ReturnMemory = "auto"
    config: str | Mapping[str, Any] | None = None
    process_group_backend: str | None = None
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        self.policy  # noqa: B018  # checks the precision and the reduction against each other
        self.adapters  # noqa: B018  # checks them against each other
        self._check_choices()
        self._check_sizes()
        self._check_offload()
        if not self.timeout > 0:
            raise ConfigurationError(f"timeout={self.timeout!r} must be a positive number of seconds.", where="options")

    @property
    def policy(self) -> PrecisionPolicy:
        """The dtypes of the precision."""
        return PrecisionPolicy(self.precision, self.reduce_dtype)

    @property
    def adapters(self) -> AdapterSettings:
        """What is put into the model."""
        return AdapterSettings(self.lora, self.quantization, self.double_quant)

    def _check_choices(self) -> None:
        # A user is not held to the annotation.
        if str(self.offload_params) == "nvme":
            raise ConfigurationError(
                'offload_params="nvme" does not work: DeepSpeed fails at its second step for want of swap buffers.',
                where="offload_params",
                fix='Use offload_params="cpu"; offload_optimizer="nvme" works.',
            )
        for name, choices in (("stage", ZeROStage), ("offload_optimizer", OptimizerOffload)):
            _check_choice(name, getattr(self, name), (None, *get_args(choices)))
        _check_choice("offload_params", self.offload_params, (None, *get_args(ParamOffload)))
        for name in ("pin_memory", "overlap_comm", "return_freed_memory"):
            _check_choice(name, getattr(self, name), (True, False, "auto"))

    def _check_sizes(self) -> None:
        for name in ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "sub_group_size"):
            _check_size(name, getattr(self, name), 1)
        _check_size("persistence_threshold", self.persistence_threshold, 0)

    def _check_offload(self) -> None:
        if self.offload_params == "cpu" and self.stage in (1, 2):
            raise ConfigurationError(
                f'offload_params="cpu" and stage={self.stage} contradict each other: only stage 3 cuts parameters up.',
                where="offload_params and stage",
                fix="Use stage=3, or leave offload_params out.",
            )
        if self.offload_optimizer == "nvme" and (self.stage in (1, 2) or (self.nvme_path is None and not self.config)):
            raise ConfigurationError(
                'offload_optimizer="nvme" needs stage=3 and nvme_path.',
                where="offload_optimizer",
                fix="Give stage=3 and nvme_path=, a folder on a fast local disk.",
            )
        if self.nvme_path is not None and self.offload_optimizer not in ("nvme", None):
            raise ConfigurationError(
                f"nvme_path={self.nvme_path!r} and offload_optimizer={self.offload_optimizer!r} contradict each other.",
                where="nvme_path and offload_optimizer",
                fix='Use offload_optimizer="nvme", or leave nvme_path out.',
            )


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # 1 == True, and a stage given as True is a mistake.
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        shown = ", ".join(repr(choice) for choice in allowed if choice is not None)
        raise ConfigurationError(f"{name}={value!r} is not one of {shown}.", where="options")


def _check_size(name: str, value: object, least: int) -> None:
    if value != "auto" and (type(value) is not int or value < least):
        raise ConfigurationError(
            f'{name}={value!r} is neither "auto" nor a whole number of elements from {least}.', where="options"
        )
