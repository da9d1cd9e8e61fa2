"""Checkpoints of Hugging Face models, and reloading them without paying for a fresh process each time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lightning_swift.checkpoint import export_verify, reload
from lightning_swift.strategies._checkpoint_huggingface import find_model
from tests.harness.checkpoints import save_checkpoint


class Holder(torch.nn.Module):
    """Stands for a LightningModule that holds ``model``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def checkpoint_of(model: Any, directory: Path, *, tokenizer: Any = None, **fields: Any) -> Path:
    """A committed checkpoint of a module that holds ``model``, as the strategies write it."""
    found = find_model(Holder(model))
    assert found is not None
    stored: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in Holder(model).state_dict(keep_vars=True).items():
        canonical = names.setdefault(id(tensor), name)
        if canonical == name:
            stored[f"model.{name}"] = tensor.detach()
        else:
            tied[name] = canonical

    def write_files(folder: Path) -> None:
        folder.rmdir()
        found.write_files(directory, tokenizer)

    described = {"tied": tied, "huggingface": found.path, "adapters": found.adapters}
    save_checkpoint(directory, stored, companions=write_files, **{**described, **fields})
    return directory


@contextmanager
def reload_here() -> Iterator[list[dict[str, Any]]]:
    """Answer reload requests in this process; yields the environments that the fresh processes would have had."""
    environments: list[dict[str, Any]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        environments.append(env)
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        try:
            reload.main(command[3:])
        except Exception as error:  # noqa: BLE001  # the process would end with it
            return SimpleNamespace(returncode=1, stderr=f"Traceback\n{type(error).__name__}: {error}")
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
        return SimpleNamespace(returncode=0, stderr="")

    with mock.patch.object(export_verify, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE)):
        yield environments
