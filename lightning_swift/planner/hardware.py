"""What a GPU and the machine around it can do: shipped tables, the user's own files, or the local machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_swift._shipped import nearest, shipped_folder
from lightning_swift.errors import ConfigurationError

__all__ = ["GPU", "detect", "known_gpus", "read_gpu"]

_MIB = 2**20
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
# Words of product names as nvidia-smi prints them, the more specific first.
_NAMES = (
    *(("B200", "b200"), ("H200", "h200"), ("H100", "h100"), ("L40S", "l40s"), ("5090", "rtx5090"), ("4090", "rtx4090")),
    *(("3090", "rtx3090"), ("A10G", "a10g"), ("A100", "a100"), ("A10", "a10"), ("L4", "l4"), ("T4", "t4")),
)
_ALIASES = {"a100": "a100-80", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090", "a100-40gb": "a100-40"}


@dataclass(frozen=True)
class GPU:
    """A card and its usual surroundings. Rates are per second and in one direction.

    Args:
        key: Short name, such as ``"a10"``.
        name: Product name.
        memory_mib: Memory as ``nvidia-smi`` shows it, in MiB.
        tflops: Dense BF16 (or FP16) matrix products, 10^12 operations.
        bandwidth: Device memory, GB.
        pcie: Host link, GB.
        nvlink: Link to the other cards of the machine, GB; 0 without.
        peer_to_peer: Cards reach each other over PCIe without the host.
        bfloat16: Has BF16 tensor cores.
        network: Network between machines per card, GB.
        host_memory: Host memory per card, GB.
        per_node: Cards per machine.
    """

    key: str
    name: str
    memory_mib: float
    tflops: float
    bandwidth: float
    pcie: float
    nvlink: float
    peer_to_peer: bool
    bfloat16: bool
    network: float
    host_memory: float
    per_node: int

    @property
    def memory(self) -> float:
        """Memory in bytes."""
        return self.memory_mib * _MIB

    @property
    def link(self) -> float:
        """GB/s per card and direction between cards of one machine."""
        if self.nvlink:
            return self.nvlink
        # Without peer-to-peer every byte crosses the host link twice.
        return self.pcie if self.peer_to_peer else self.pcie / 2


def known_gpus() -> dict[str, Path]:
    """The shipped hardware files by short name."""
    return {path.stem: path for path in sorted((shipped_folder("configs") / "hardware").glob("*.yaml"))}


def read_gpu(name: str | Path) -> GPU:
    """The GPU of a short name, of a YAML file, or (``"auto"``) of this machine.

    Raises:
        ConfigurationError: Unknown name, no GPU found, or a file that lacks a figure or has an impossible one.
    """
    if name == "auto":
        return detect()
    if str(name).endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigurationError("no such hardware file.", where=f"--gpu {name}")
        return _parse(path)
    known = known_gpus()
    key = _key(str(name))
    if key not in known:
        raise ConfigurationError(
            f"unknown GPU {str(name)!r}.",
            where="--gpu",
            fix=f"The nearest is {nearest(key, known)!r}. Known: {', '.join(known)}; or give a YAML file like theirs.",
        )
    return _parse(known[key])


def detect() -> GPU:
    """The first GPU of this machine, with its own memory figure.

    Raises:
        ConfigurationError: There is none, or none that the tables know.
    """
    if shutil.which(_QUERY[0]) is None:
        raise ConfigurationError(
            "no NVIDIA GPU found here (there is no nvidia-smi).", where="--gpu auto", fix="Name one, as in --gpu a10."
        )
    try:
        listed = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()  # noqa: S603
        name, memory = (part.strip() for part in listed[0].rsplit(",", 1))
        mib = float(memory)
    except (subprocess.SubprocessError, IndexError, ValueError) as error:
        raise ConfigurationError(
            f"nvidia-smi does not tell the GPU ({error}).", where="--gpu auto", fix="Name one, as in --gpu a10."
        ) from error
    return _identify(name, mib)


def _identify(name: str, mib: float) -> GPU:
    key = next((short for word, short in _NAMES if word in name), None)
    if key is None:
        raise ConfigurationError(
            f"the tables do not know {name!r}.",
            where="--gpu auto",
            fix="Give a YAML file like those of configs/hardware.",
        )
    if key == "a100":
        key = "a100-40" if mib < 50_000 else "a100-80"
    gpu = read_gpu(key)
    return GPU(**{**{f.name: getattr(gpu, f.name) for f in fields(GPU)}, "name": name, "memory_mib": mib})


def _key(name: str) -> str:
    key = name.lower().strip().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("geforce-")
    key = key.replace("rtx-", "rtx")
    return _ALIASES.get(key, key)


def _parse(path: Path) -> GPU:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"not readable as YAML ({error}).", where=str(path)) from error
    if not isinstance(values, Mapping):
        raise ConfigurationError("not a list of figures like those of configs/hardware.", where=str(path))
    names = [field.name for field in fields(GPU) if field.name != "key"]
    wrong = sorted(set(values) ^ set(names))
    if wrong:
        raise ConfigurationError(
            f"missing or unknown: {', '.join(map(str, wrong))}.", where=str(path), fix=f"Give {', '.join(names)}."
        )
    return GPU(key=path.stem, **{name: _figure(path, name, values[name]) for name in names})


def _figure(path: Path, name: str, value: Any) -> Any:
    if name == "name":
        return str(value)
    if name in ("peer_to_peer", "bfloat16"):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} is not true or false.", where=str(path))
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or (value == 0 and name != "nvlink"):
        raise ConfigurationError(f"{name}={value!r} is not a positive number.", where=str(path))
    return int(value) if name == "per_node" else float(value)
