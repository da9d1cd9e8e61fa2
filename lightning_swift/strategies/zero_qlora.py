"""QLoRA under ZeRO-3: the preset for one card, or for as many as there are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_swift.adapters.quantise import element_count, is_quantised
from lightning_swift.adapters.settings import LoraSettings, Quantization
from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.dtypes import PrecisionName
from lightning_swift.strategies._checkpoint_frozen import SaveFrozen
from lightning_swift.strategies._zero_options import OptimizerOffload, ParamOffload
from lightning_swift.strategies.zero import ZeROStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["ZeRO3QLoRAStrategy"]

# Bytes of device memory per trainable element: FP32 master, two moments and gradient, BF16 copy and gradient.
_TRAINED = 20
# Bytes per element of what is frozen: packed with its scales, and in BF16.
_PACKED = {"nf4": 0.53, "int8": 1.01}
_FROZEN = 2
# Shares of a device's memory below which offloading would save next to nothing, and above which it is needed.
_WORTH_OFFLOADING = 0.05
_TOO_LARGE = 0.6


class ZeRO3QLoRAStrategy(ZeROStrategy):
    """Fine-tunes any LightningModule's Hugging Face model by QLoRA; also by name: ``swift_zero3_qlora``.

    The frozen linear layers are quantised while they are loaded, one by one; LoRA adapters are put in by peft; head
    and embedding stay in BF16; the user's optimizer gets what is trainable. Build the model by ``lazy_pretrained``
    (``CausalLM`` does): a plain ``from_pretrained`` works too, and needs memory for the whole model first.

    With ``"auto"`` what buys memory is offloaded to the host, and a line says what and why. The adapters' optimizer
    state goes there when it would take more than 5 % of a GPU's memory, the packed weights when they would take more
    than 60 %; both cost copies at every step. CPU ranks have nothing to offload to.

    On one rank there is nothing to cut up: unless parameters are offloaded, the engine is that of stage 2, which does
    the same without a hook on every layer.

    Args:
        lora: The adapters.
        quantization: ``"nf4"`` (4 bits) or ``"int8"``, for the frozen linear layers.
        double_quant: With ``"nf4"``, quantise the scales as well.
        precision: As for :class:`ZeROStrategy`.
        offload_optimizer: ``"auto"``, ``"none"`` or ``"cpu"``.
        offload_params: ``"auto"``, ``"none"`` or ``"cpu"``.
        save_frozen: Whether checkpoints repeat frozen weights that are those of the pretrained folder. ``"auto"``
            leaves them out of models with adapters: the checkpoint then names the folder and its content, and resuming,
            merging and exporting need it. Whatever is not in the folder as it is in memory is saved in any case.
        config: A DeepSpeed configuration to start from, as for :class:`ZeROStrategy`.
        process_group_backend: ``"nccl"``, ``"gloo"``...; None chooses by device.
        timeout: Seconds after which a collective that not all ranks have joined is an error.

    Raises:
        ConfigurationError: A value that is not allowed, or options that contradict each other.
    """

    def __init__(
        self,
        lora: LoraSettings | None = None,
        quantization: Quantization = "nf4",
        *,
        double_quant: bool = True,
        precision: PrecisionName = "bf16-mixed",
        offload_optimizer: OptimizerOffload | Literal["auto"] = "auto",
        offload_params: ParamOffload | Literal["auto"] = "auto",
        save_frozen: SaveFrozen = "auto",
        config: str | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if quantization is None:
            raise ConfigurationError(
                "quantization=None would be plain LoRA.",
                where="ZeRO3QLoRAStrategy",
                fix="Use ZeROStrategy(stage=3, lora=LoraSettings(...)).",
            )
        self._auto_optimizer, self._auto_params = offload_optimizer == "auto", offload_params == "auto"
        super().__init__(
            3,
            precision,
            offload_optimizer=None if offload_optimizer == "auto" else offload_optimizer,
            offload_params=None if offload_params == "auto" else offload_params,
            lora=LoraSettings() if lora is None else lora,
            quantization=quantization,
            double_quant=double_quant,
            save_frozen=save_frozen,
            config=config,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @property
    @override
    def stage(self) -> int:
        given = self.options.config is not None and "offload_param" in self._base["zero_optimization"]
        offloaded = self.options.offload_params == "cpu" or (self.options.offload_params is None and given)
        return 3 if offloaded or self._parallel_devices is None or self.world_size > 1 else 2

    @override
    def _adapt(self, module: pl.LightningModule) -> None:
        super()._adapt(module)
        if not (self._auto_optimizer or self._auto_params) or self.root_device.type != "cuda":
            return
        memory = torch.cuda.get_device_properties(self.root_device).total_memory
        states, weights = (part / self.world_size / memory for part in self._bytes(module))
        if self._auto_optimizer and states > _WORTH_OFFLOADING:
            self._offload("offload_optimizer", f"the optimizer's state would take {states:.0%} of a GPU's memory")
        if self._auto_params and weights > _TOO_LARGE:
            self._offload("offload_params", f"the weights would take {weights:.0%} of a GPU's memory")
        self.config = self._complete_config()

    def _offload(self, option: str, reason: str) -> None:
        changes: dict[str, Any] = {option: "cpu"}
        self.options = replace(self.options, **changes)
        rank_zero_info(f'{type(self).__name__}: {option}="cpu", since {reason}.')

    def _bytes(self, module: pl.LightningModule) -> tuple[float, float]:
        """Bytes of all optimizer state, and of all frozen weights."""
        packed = _PACKED[self.options.adapters.quantization or "nf4"]
        trained = sum(element_count(p) for p in module.parameters() if p.requires_grad) * _TRAINED
        frozen = [(element_count(p), is_quantised(p)) for p in module.parameters() if not p.requires_grad]
        return trained, sum(count * (packed if quantised else _FROZEN) for count, quantised in frozen)
