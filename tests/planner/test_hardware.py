"""Tables of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner import hardware
from lightning_swift.planner.hardware import known_gpus, read_gpu

WANTED = {
    *("t4", "l4", "a10", "a10g", "rtx3090", "rtx4090", "rtx5090"),
    *("a100-40", "a100-80", "l40s", "h100", "h200", "b200"),
}


def test_every_card_is_there_with_a_source() -> None:
    assert set(known_gpus()) == WANTED
    for path in known_gpus().values():
        assert read_gpu(path.stem).memory > 10e9
        assert "sheet" in path.read_text() or "white paper" in path.read_text()


def test_names_as_people_write_them() -> None:
    assert read_gpu("A100").key == "a100-80"
    assert read_gpu("NVIDIA RTX 4090").key == "rtx4090"
    # GeForce cards reach each other through the host only.
    assert read_gpu("4090").link < read_gpu("L40S").link


def test_a_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(known_gpus()["a10"].read_text().replace("tflops: 125", "tflops: 99"))
    assert read_gpu(file).tflops == 99
    file.write_text(file.read_text().replace("tflops: 99", "tflops: -1"))
    with pytest.raises(ConfigurationError, match="tflops=-1"):
        read_gpu(file)
    file.write_text("name: x\n")
    with pytest.raises(ConfigurationError, match="missing or unknown"):
        read_gpu(file)


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="nearest is 'h100'"):
        read_gpu("h101")


@pytest.mark.parametrize(
    ("name", "mib", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx3090"),
    ],
)
def test_names_that_the_driver_prints(name: str, mib: float, key: str) -> None:
    found = hardware._identify(name, mib)
    assert (found.key, found.name, found.memory_mib) == (key, name, mib)


def test_a_card_that_the_tables_do_not_know() -> None:
    with pytest.raises(ConfigurationError, match="do not know 'Voodoo 2'"):
        hardware._identify("Voodoo 2", 12)
