"""Model and optimizer state by name, in one process: ties, odd names, odd optimizers, and no step taken in secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_swift.checkpoint.layout import RunRecord
from lightning_swift.checkpoint.sharded import Description, load_into, read_index, save
from lightning_swift.errors import CheckpointError, CheckpointMismatchError
from lightning_swift.strategies._checkpoint_state import (
    Request,
    model_state,
    optimizer_state,
    tied_names,
    without_aliases,
)


class Tied(nn.Module):
    def __init__(self, *, tie: bool = True, fill: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        nn.init.constant_(self.embed.weight, fill)
        nn.init.constant_(self.head.weight, -fill)
        if tie:
            self.head.weight = self.embed.weight


def write(path: Path, module: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, str]:
    kept, tied = without_aliases(model_state(module), tied_names(module))
    state: dict[str, Any] = {f"model.{name}": value for name, value in kept.items()}
    for number, optimizer in enumerate(optimizers):
        state |= {f"optimizer_{number}.{n}": v for n, v in optimizer_state(module, optimizer).items()}
    run = RunRecord(id="run-1", started="2026-01-01T00:00:00")
    save(path, state=state, meta={}, description=Description(run=run, global_step=1, strategy="T", mesh={}, tied=tied))
    return tied


def read(
    path: Path, module: nn.Module, *optimizers: torch.optim.Optimizer, tied: dict[str, str] | None = None, **kwargs: Any
) -> None:
    request = Request(module, optimizers, read_index(path), tied or {})
    report = load_into(path, request.state, **{"strict": True, **kwargs})
    request.install(frozenset(report.loaded))


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        sum(p.square().sum() for p in module.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_tied_tensor_is_stored_once_and_comes_back_tied(tmp_path: Path) -> None:
    tied = write(tmp_path / "a.ckpt", Tied(fill=3.0))
    assert tied == {"head.weight": "embed.weight"}
    assert list(read_index(tmp_path / "a.ckpt")) == ["model.embed.weight"]
    module = Tied()
    read(tmp_path / "a.ckpt", module, tied=tied)
    assert module.head.weight is module.embed.weight
    assert module.head.weight.eq(3).all()


def test_what_was_tied_fills_both_names_of_a_model_that_is_not(tmp_path: Path) -> None:
    tied = write(tmp_path / "a.ckpt", Tied(fill=3.0))
    module = Tied(tie=False)
    read(tmp_path / "a.ckpt", module, tied=tied)
    assert module.head.weight.eq(3).all()
    assert module.embed.weight.eq(3).all()


def test_a_tie_under_the_other_name_is_found(tmp_path: Path) -> None:
    class Reversed(Tied):
        def __init__(self) -> None:
            super().__init__()
            weight = self.embed.weight
            del self._modules["embed"]
            self.embed = nn.Embedding(6, 4)
            self.embed.weight = weight

    tied = write(tmp_path / "a.ckpt", Tied(fill=3.0))
    module = Reversed()
    assert tied_names(module) == {"embed.weight": "head.weight"}
    read(tmp_path / "a.ckpt", module, tied=tied)
    assert module.embed.weight.eq(3).all()


class Nested(nn.Module):
    """Names that begin with one another: ``a`` has a weight of its own and a child ``a.b``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.a.b = nn.Linear(2, 2)
        self.a.weight_b = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ],
    ids=["amsgrad", "momentum", "sgd", "rmsprop", "tensor rate", "factored"],
)
def test_every_moment_and_option_comes_back(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Nested()
    optimizer = build(module.parameters())
    trained(module, optimizer)
    write(tmp_path / "a.ckpt", module, optimizer)
    other = Nested()
    resumed = build(other.parameters())
    resumed.param_groups[0]["lr"] = 7.0
    read(tmp_path / "a.ckpt", other, resumed)
    before, after = optimizer_state(module, optimizer), optimizer_state(other, resumed)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name
    trained(module, optimizer, 1)
    trained(other, resumed, 1)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_taking_the_state_takes_no_step() -> None:
    module = Nested()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    flat = optimizer_state(module, optimizer)
    assert not optimizer.state
    assert all(name.startswith("param_groups.") for name in flat)


def test_parameters_without_state_keep_none(tmp_path: Path) -> None:
    module = Nested()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.a.weight.sum().backward()
    optimizer.step()
    write(tmp_path / "a.ckpt", module, optimizer)
    other = Nested()
    resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
    read(tmp_path / "a.ckpt", other, resumed)
    assert list(resumed.state) == [other.a.weight]


def test_a_parameter_that_was_not_trained_before_is_named(tmp_path: Path) -> None:
    module = Nested()
    write(tmp_path / "a.ckpt", module, torch.optim.SGD([module.a.weight], lr=0.1))
    other = Nested()
    resumed = torch.optim.SGD([other.a.weight, other.a.bias], lr=0.2)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer_0\.param_groups\.a\.bias\.lr"):
        read(tmp_path / "a.ckpt", other, resumed)
    read(tmp_path / "a.ckpt", other, resumed, strict=False)
    assert resumed.param_groups[0]["lr"] == 0.1


def test_groups_formed_in_another_way_are_refused(tmp_path: Path) -> None:
    module = Nested()
    groups = [{"params": [module.a.weight], "lr": 0.1}, {"params": [module.a.bias], "lr": 0.2}]
    write(tmp_path / "a.ckpt", module, torch.optim.SGD(groups))
    other = Nested()
    with pytest.raises(CheckpointMismatchError, match="several values of lr"):
        read(tmp_path / "a.ckpt", other, torch.optim.SGD([other.a.weight, other.a.bias], lr=0.3))


def test_how_a_step_is_executed_is_not_taken_from_the_checkpoint(tmp_path: Path) -> None:
    module = Nested()
    write(tmp_path / "a.ckpt", module, torch.optim.SGD(module.parameters(), lr=0.1, foreach=True))
    other = Nested()
    resumed = torch.optim.SGD(other.parameters(), lr=0.5, foreach=False)
    read(tmp_path / "a.ckpt", other, resumed)
    assert resumed.param_groups[0]["foreach"] is False
    assert resumed.param_groups[0]["lr"] == 0.1


def test_a_parameter_from_elsewhere_and_nested_state_are_refused() -> None:
    module = Nested()
    stray = torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"shape \(9,\) that is not in the LightningModule"):
        optimizer_state(module, stray)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.a.weight] = {"blocks": [torch.zeros(2)]}
    with pytest.raises(CheckpointError, match=r"tensors inside a list \(blocks of a\.weight\)"):
        optimizer_state(module, optimizer)


class Extra(nn.Module):
    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note
        self.register_buffer("count", torch.tensor(0 if not note else 5))

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_buffers_and_extra_state_come_back(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", nn.Sequential(Extra("kept")))
    module = nn.Sequential(Extra(""))
    read(tmp_path / "a.ckpt", module)
    assert module[0].note == "kept"
    assert module[0].count.item() == 5


class Compiled(nn.Module):
    """The wrapper that torch.compile puts around a module, without its compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)


def test_marks_of_compilation_are_no_part_of_a_name(tmp_path: Path) -> None:
    compiled, plain = nn.Sequential(Compiled()), nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.5)
    trained(compiled, optimizer)
    write(tmp_path / "a.ckpt", compiled, optimizer)
    assert "model.0.weight" in read_index(tmp_path / "a.ckpt")
    resumed = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    read(tmp_path / "a.ckpt", plain, resumed)
    assert torch.equal(plain[0].weight, compiled[0]._orig_mod.weight)
    assert len(resumed.state) == 2


class _Stages(nn.Module):
    """Two stages on one rank, each with its copy of a tied weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False)})
        self.last = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False), "norm": nn.LayerNorm(4)})
        self.last["embed"].load_state_dict(self.first["embed"].state_dict())


def _global(name: str) -> str:
    return name.removeprefix("first.").removeprefix("last.")


def test_copies_under_one_global_name_are_saved_once_and_all_filled(tmp_path: Path) -> None:
    module, other = _Stages(0), _Stages(1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, other)]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    state = {f"model.{name}": value for name, value in model_state(module, rename=_global).items()}
    flat = optimizer_state(module, optimizers[0], rename=_global)
    state |= {f"optimizer_0.{name}": value for name, value in flat.items()}
    assert [name for name in state if name.startswith("model.")] == [
        "model.embed.weight",
        "model.norm.weight",
        "model.norm.bias",
    ]
    run = RunRecord(id="run-1", started="2026-01-01T00:00:00")
    described = Description(run=run, global_step=1, strategy="T", mesh={})
    save(tmp_path / "a.ckpt", state=state, meta={}, description=described)
    request = Request(other, [optimizers[1]], read_index(tmp_path / "a.ckpt"), {}, rename=_global)
    report = load_into(tmp_path / "a.ckpt", request.state, strict=True)
    request.install(frozenset(report.loaded))
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        moments = [optimizer.state[p] for optimizer, p in zip(optimizers, (one, two), strict=True)]
        assert torch.equal(moments[0]["exp_avg"], moments[1]["exp_avg"])
    first, last = (optimizers[1].state[stage["embed"].weight]["exp_avg"] for stage in (other.first, other.last))
    assert first.data_ptr() != last.data_ptr()
