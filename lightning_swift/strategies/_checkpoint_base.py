"""The pretrained folder beneath a checkpoint: what is left to it when saving, and taken from it when resuming."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightning_swift.checkpoint.base import differing_files, verified_base
from lightning_swift.checkpoint.layout import MODEL_PREFIX, BaseRecord, Manifest
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointMismatchError
from lightning_swift.models.lazy import lazy_folder
from lightning_swift.strategies._checkpoint_frozen import FrozenWeights, SaveFrozen, companions_of, fill_from_base
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel
from lightning_swift.strategies._checkpoint_quantised import describe_quantised

__all__ = ["PretrainedBase"]

# What must be alike for the weights of a quantised model to be alike.
_MAKING = ("kind", "double_quant", "blocksize")


class PretrainedBase:
    """Keeps what is known about the frozen weights of a module for as long as its strategy lives.

    Args:
        module: The LightningModule.
        model: Its Hugging Face model, or None.
        rename: From a name in the module to the name it is saved under.
    """

    def __init__(self, module: nn.Module, model: HuggingFaceModel | None, rename: Callable[[str], str]) -> None:
        self._module, self._model, self._rename = module, model, rename
        self._known: FrozenWeights | None = None
        # Whether nothing but its folder has given a lazy model its frozen weights.
        self._untouched = True
        self.quantization = describe_quantised(module, rename)

    def leave_out(
        self, weights: Mapping[str, Any], trained: set[str], save_frozen: SaveFrozen
    ) -> tuple[dict[str, Any], BaseRecord | None]:
        """``weights`` without those that the folder holds, and where these are. A collective call.

        Args:
            weights: What would be saved of the model on this rank, by saved name.
            trained: Names of parameters that an optimizer has changed.
            save_frozen: ``"auto"`` leaves weights out of models with adapters only.
        """
        adapted = self._model is not None and self._model.adapters is not None
        if self._model is None or save_frozen is True or (save_frozen == "auto" and not adapted):
            return dict(weights), None
        frozen = {
            name
            for own, parameter in self._module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and (name := self._rename(own)) not in trained
        }
        record = self._weights(self._model).record(weights, frozen, believed=self._believed)
        if record is None:
            return dict(weights), None
        inside = self._covered(record, {})
        return {name: value for name, value in weights.items() if not inside(name)}, record

    def before_loading(self, manifest: Manifest, wanted: dict[str, Any]) -> dict[str, Any]:
        """Take out of ``wanted`` (names with their section prefix) what the checkpoint leaves to the folder.

        Returns:
            The tensors taken out, by saved name.

        Raises:
            CheckpointMismatchError: The model is quantised in another way than when the checkpoint was saved.
        """
        self._check_quantised(manifest)
        if manifest.base is None:
            self.distrust()
            return {}
        inside = self._covered(manifest.base, manifest.tied)
        names = [key for key in wanted if key.startswith(MODEL_PREFIX) and inside(key.removeprefix(MODEL_PREFIX))]
        return {key.removeprefix(MODEL_PREFIX): wanted.pop(key) for key in names}

    def fill(self, manifest: Manifest, values: Mapping[str, Any]) -> None:
        """Give ``values`` (of :meth:`before_loading`) what the folder holds, once it is verified. A collective call.

        Raises:
            CheckpointError: The folder is gone or has changed.
        """
        base = manifest.base
        if base is None:
            return
        ranks, place = Ranks.current(), Path(base.folder)
        share = _shared_between_local_ranks(base)
        with Together(ranks, "looking at the model's own folder", place) as step:
            mine = None if self._model is None else self._weights(self._model).folder
            step.value = mine is not None and not differing_files(mine, share.files)
        # The model's own folder has the same content where it has moved; else the one that the checkpoint names.
        own = mine if all(step.values) else None
        with Together(ranks, "verifying the pretrained folder", place):
            folder = verified_base(share) if own is None else own
        if own is not None and self._believed:
            return
        self.distrust()
        tied = {alias: base.tensors[name] for alias, name in manifest.tied.items() if name in base.tensors}
        full = BaseRecord(base.folder, base.files, {**base.tensors, **tied})
        with Together(ranks, "reading the pretrained folder", folder):
            fill_from_base(values, full, folder, module=self._module, rename=self._rename)

    def distrust(self) -> None:
        """Take note that frozen weights have come from elsewhere than the folder: they are compared from now on."""
        self._untouched = False

    @property
    def _believed(self) -> bool:
        return self._untouched and lazy_folder(self._module) is not None

    def _weights(self, model: HuggingFaceModel) -> FrozenWeights:
        if self._known is None:
            self._known = FrozenWeights(self._module, model, self._rename)
        return self._known

    def _covered(self, record: BaseRecord, tied: Mapping[str, str]) -> Callable[[str], bool]:
        names = {*record.tensors, *(alias for alias, name in tied.items() if name in record.tensors)}
        layers = self.quantization["layers"] if self.quantization is not None else {}
        beside = tuple(part for name in names for part in companions_of(name, name in layers))
        return lambda name: name in names or (bool(beside) and name.startswith(beside))

    def _check_quantised(self, manifest: Manifest) -> None:
        then, now = manifest.quantization, self.quantization
        if _making(then) != _making(now):
            raise CheckpointMismatchError(
                f"the weights under the adapters were {_words(then)} when the checkpoint was saved, and are "
                f"{_words(now)} here; the adapters would not fit them.",
                fix="Use the quantization= and double_quant= of the run that saved it.",
            )


def _making(quantization: Mapping[str, Any] | None) -> tuple[Any, ...]:
    return () if quantization is None else tuple(quantization.get(key) for key in _MAKING)


def _words(quantization: Mapping[str, Any] | None) -> str:
    if quantization is None:
        return "not quantised"
    return f"quantised as {quantization['kind']}{' twice' if quantization.get('double_quant') else ''}"


def _shared_between_local_ranks(base: BaseRecord) -> BaseRecord:
    """This rank's share of the files: machines may have folders of their own, ranks of one machine do not."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Lightning's own launcher tells the rank but not their number; then each verifies everything.
    rank = int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else 0
    by_size = sorted(base.files, key=lambda name: -base.files[name].size)
    return BaseRecord(base.folder, {name: base.files[name] for name in by_size[rank::size]}, base.tensors)
