"""Pretrained models whose weights stay on disk until the model has been sharded.

:func:`lazy_pretrained` builds a Hugging Face model with its parameters on the meta device and its buffers real, and
remembers the folder. After ``fully_shard`` has cut the empty parameters, :func:`load_lazy_weights` fills each of them
with exactly the slice that this rank holds. No rank ever has the whole model in memory, and nothing is broadcast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightning_swift.adapters.quantise import is_quantised, quantised_weight
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models._adapters import Part, Region, adapter_parts
from lightning_swift.models._folder import FolderTensor, WeightReader, read_config, tensors_of
from lightning_swift.models._naming import listed, match_names
from lightning_swift.parallel.memory import trim_freed_memory

__all__ = ["LoadReport", "Precision", "is_lazy", "lazy_folder", "lazy_pretrained", "load_lazy_weights"]

Precision = Literal["float32", "bfloat16", "float16"]

_SOURCE = "_lightning_swift_source"
# What wrappers put into the names of the parameters they wrap: checkpointing, torch.compile, peft.
_WRAPPERS = re.compile(r"(?:_checkpoint_wrapped_module|_orig_mod|base_layer|original_module|modules_to_save\.[^.]+)\.")


@dataclass(frozen=True)
class _Source:
    """What a lazy model remembers: its folder, and which tensor of it each of its own names is."""

    folder: str
    tensors: Mapping[str, FolderTensor]


@dataclass(frozen=True)
class LoadReport:
    """What one rank read: bytes and tensors taken from the files, and tensors of the folder that no name asked for."""

    bytes_read: int = 0
    tensors: int = 0
    unexpected: tuple[str, ...] = ()


def lazy_pretrained(
    path: str | Path, auto_class: Any = None, *, dtype: Precision = "float32", **config_overrides: object
) -> Any:
    """Build the model of a local Hugging Face folder without reading its weights.

    The result is what ``auto_class.from_pretrained(path)`` gives (evaluation mode, tied weights, generation
    settings), except that its parameters hold no data yet. The strategies of this package fill them; under any other
    one call :func:`load_lazy_weights`. Until then a forward pass raises :class:`ModelError`.

    Args:
        path: Folder with ``config.json`` and safetensors weights, in one file or with an index.
        auto_class: ``AutoModelForCausalLM`` if None; another ``AutoModel...`` or a model class of transformers.
        dtype: Type of the parameters; weights stored otherwise are converted as they are read. Training wants the
            FP32 masters of the default.
        config_overrides: Options of ``config.json`` to change, and ``attn_implementation``.

    Returns:
        The model, with parameters on the meta device and real buffers.

    Raises:
        ModelError: The folder cannot be used: missing, pickled, quantised, damaged, needing its own code, or without
            some weight that the model has, or with one of another shape.
        ConfigurationError: An override that the configuration does not have, or an unknown ``dtype``.
    """
    if dtype not in get_args(Precision):
        raise ConfigurationError(
            f"dtype {dtype!r} is not supported.",
            where="lazy_pretrained",
            fix=f"Choose one of {', '.join(get_args(Precision))}.",
        )
    folder = Path(path)
    config = read_config(folder, config_overrides)
    tensors = tensors_of(folder)
    # Buffers are to be real whatever device is the default where this is called.
    with torch.device("cpu"), _parameters_on_meta():
        model = _build(config, auto_class, getattr(torch, dtype))
    model.eval()
    _take_generation_config(model, folder)
    setattr(model, _SOURCE, _Source(str(folder), match_names(model, tensors, folder)))
    model.register_forward_pre_hook(_refuse_empty)
    return model


def is_lazy(module: nn.Module) -> bool:
    """Whether a model below ``module`` still waits for its weights."""
    return any(p.is_meta for model in _lazy_models(module) for p in model.parameters())


def lazy_folder(module: nn.Module) -> Path | None:
    """The folder that the first lazily built model below ``module`` comes from, also after loading; None if none."""
    return next((Path(getattr(model, _SOURCE).folder) for model in _lazy_models(module)), None)


def load_lazy_weights(
    root: nn.Module, *, device: torch.device | str, place: Callable[[nn.Parameter], None] | None = None
) -> LoadReport:
    """Give every empty parameter of the lazy models below ``root`` its values, in place.

    A ``DTensor`` gets this rank's part and only that part is read; a plain parameter gets the whole tensor. Tied
    parameters stay one object and are read once. LoRA parameters that peft left empty get their first values, the
    same on every rank. Buffers of the models move to ``device`` as well. Without a lazy model below ``root`` nothing
    happens. No collective is involved.

    Args:
        root: Any module that holds models of :func:`lazy_pretrained`, wrapped by peft or not.
        device: Where the parameters are to live.
        place: Called with each parameter when it has its values and before the next is read; may cast it in place, or
            cut it up as ZeRO-3 does.

    Raises:
        ModelError: A parameter on the meta device has no counterpart in the folder.
    """
    target = torch.device(device)
    total = LoadReport()
    for model in _lazy_models(root):
        source: _Source = getattr(model, _SOURCE)
        with WeightReader(Path(source.folder)) as reader:
            report = _Loader(source, reader, target, place).load(model)
        total = LoadReport(
            total.bytes_read + report.bytes_read, total.tensors + report.tensors, total.unexpected + report.unexpected
        )
        _drop_refusal(model)
    return total


def _lazy_models(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if _SOURCE in module.__dict__]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While active, every parameter registered on a module keeps its shape and type but no data; buffers stay real.

    A plain ``torch.device("meta")`` would also empty the buffers that no file holds, such as rotary tables. The hook
    is torch's own, global to the process, and removed at the end; weights tied before registration stay tied.
    """
    replaced = WeakIdKeyDictionary()

    def replace(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        empty: nn.Parameter | None = replaced.get(parameter)
        if empty is None:
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            replaced[parameter] = empty
        return empty

    # torch annotates the hook as returning nothing, but documents that it may return the parameter to use.
    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _build(config: Any, auto_class: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import set_zero3_state

    kind: Any = AutoModelForCausalLM if auto_class is None else auto_class
    if not hasattr(kind, "from_config") and not hasattr(kind, "_from_config"):
        raise ConfigurationError(
            f"{kind!r} is neither an AutoModel class nor a model class of transformers.",
            where="auto_class",
            fix="Pass AutoModelForCausalLM or another class of transformers.",
        )
    try:
        # Under ZeRO-3, transformers would cut the empty parameters up while it makes them.
        with set_zero3_state():
            if hasattr(kind, "from_config"):
                return kind.from_config(config, dtype=dtype, trust_remote_code=False)
            return kind._from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(
            f"{kind.__name__} cannot build this configuration ({error}).",
            where=str(config.name_or_path),
            fix="Name an auto_class that has this architecture.",
        ) from None


def _take_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, TypeError, json.JSONDecodeError) as error:
            raise ModelError(
                f"cannot be used ({error}).",
                where=str(folder / "generation_config.json"),
                fix="Correct the file, or remove it.",
            ) from None


class _Loader:
    """Fills the parameters and buffers of one lazy model."""

    def __init__(
        self,
        source: _Source,
        reader: WeightReader,
        device: torch.device,
        place: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self._source, self._reader, self._device, self._place = source, reader, device, place
        self._filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._used: set[str] = set()
        self._tensors = 0

    def load(self, model: nn.Module) -> LoadReport:
        empty = {
            f"{prefix}.{name}" if prefix else name: (module, name, parameter)
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        }
        for full_name, (_, _, parameter) in empty.items():
            tensor = self._find(full_name)
            # Of two tied names often one only is in the folder, and not always the first.
            if tensor is not None and id(parameter) not in self._filled:
                self._fill(parameter, self._part_reader(tensor, parameter.dtype))
        missing = {full: place for full, place in empty.items() if id(place[2]) not in self._filled}
        self._install(place for full, place in empty.items() if full not in missing)
        if missing:
            self._initialise(model, {name: parameter for name, (*_, parameter) in missing.items()})
            self._install(missing.values())
        self._load_buffers(model)
        known = self._source.tensors.items()
        unexpected = sorted(tensor.name for name, tensor in known if name not in self._used)
        return LoadReport(self._reader.bytes_read, self._tensors, tuple(unexpected))

    def _install(self, places: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for module, name, parameter in places:
            module._parameters[name] = self._filled[id(parameter)][1]

    def _find(self, name: str) -> FolderTensor | None:
        known = name if name in self._source.tensors else _WRAPPERS.sub("", name)
        self._used.add(known)
        return self._source.tensors.get(known)

    def _fill(self, empty: nn.Parameter, part: Part) -> None:
        values: Tensor
        if is_quantised(empty):
            whole = part(((0,) * empty.dim(), tuple(empty.shape)))
            self._keep(empty, quantised_weight(empty, whole))
            del whole
            trim_freed_memory()
            return
        if isinstance(empty, DTensor):
            # What torch's own checkpoints save of this parameter on this rank; also right for strided shards.
            (chunk,) = empty.__create_chunk_list__()
            values = DTensor.from_local(
                part((tuple(chunk.offsets), tuple(chunk.sizes))).to(empty.dtype),
                empty.device_mesh,
                empty.placements,
                run_check=False,
                shape=empty.shape,
                stride=empty.stride(),
            )
        else:
            values = part(((0,) * empty.dim(), tuple(empty.shape))).to(empty.dtype)
        self._keep(empty, nn.Parameter(values, requires_grad=empty.requires_grad))

    def _keep(self, empty: nn.Parameter, filled: nn.Parameter) -> None:
        if self._place is not None:
            self._place(filled)
        self._filled[id(empty)] = (empty, filled)

    def _part_reader(self, tensor: FolderTensor, dtype: torch.dtype) -> Part:
        def read(region: Region) -> Tensor:
            self._tensors += 1
            # A copy, so that nothing refers to the mapped file once the reader is closed.
            part: Tensor = self._reader.read(tensor, *region)
            return part.to(device=self._device, dtype=dtype, copy=True).contiguous()

        return read

    def _initialise(self, model: nn.Module, missing: dict[str, nn.Parameter]) -> None:
        for name, part in adapter_parts(model, self._folder_part, self._device):
            if name in missing:
                self._fill(missing.pop(name), part)
        if missing:
            raise ModelError(
                f"{listed(list(missing))} are empty and have no weights in the folder.",
                where=self._source.folder,
                fix="Build what is added to a lazy model with real values, or build the model with from_pretrained.",
            )

    def _folder_part(self, name: str, dtype: torch.dtype) -> tuple[Part, tuple[int, ...]]:
        tensor = self._find(name)
        assert tensor is not None
        return self._part_reader(tensor, dtype), tensor.shape

    def _load_buffers(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                tensor = self._find(f"{prefix}.{name}" if prefix else name)
                whole = ((0,) * buffer.dim(), tuple(buffer.shape))
                module._buffers[name] = (
                    buffer.to(self._device) if tensor is None else self._part_reader(tensor, buffer.dtype)(whole)
                )


def _refuse_empty(model: nn.Module, _: object) -> None:
    if not any(p.is_meta for p in model.parameters()):
        return
    raise ModelError(
        "the weights of this model have not been read from its folder yet.",
        where=getattr(model, _SOURCE).folder,
        fix="Use a strategy of lightning_swift, or call load_lazy_weights(model, device=...) in configure_model.",
    )


def _drop_refusal(model: nn.Module) -> None:
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_empty:
            del model._forward_pre_hooks[key]
