"""What may be asked for, what is refused, and what is left of a user's optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.optimizers import keep_trainable
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import lazy_pretrained
from tests.adapters.models import LORA, Holder, pretrained
from tests.harness.models import save_tiny_model, tiny_model


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"r": 0}, "r=0"),
        ({"r": 2.0}, r"r=2\.0"),
        ({"r": True}, "r=True"),
        ({"alpha": 0}, "alpha=0"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"dropout": -0.1}, r"dropout=-0\.1"),
        ({"target_modules": []}, r"target_modules=\[\]"),
        ({"target_modules": ""}, "target_modules=''"),
    ],
)
def test_values_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        LoraSettings(**options)


def test_combinations_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"quantization and lora: quantization='nf4' .* without lora="):
        AdapterSettings(quantization="nf4")
    with pytest.raises(ConfigurationError, match="'fp4' is not one of nf4, int8"):
        AdapterSettings(LORA, "fp4")  # type: ignore[arg-type]
    assert not AdapterSettings().is_active
    assert AdapterSettings(LORA, "int8").is_active


def test_the_report_counts_matrices_and_not_bytes(tmp_path) -> None:
    folder = save_tiny_model(tmp_path, layers=2)
    whole = sum(p.numel() for p in pretrained(folder).parameters())
    for lazy in (True, False):
        for kind in (None, "nf4", "int8"):
            holder = Holder(lazy_pretrained(folder) if lazy else pretrained(folder))
            settings = AdapterSettings(LORA, kind)  # type: ignore[arg-type]
            report = apply_adapters(holder, settings, compute_dtype=torch.float32)
            adapters = sum(p.numel() for p in holder.parameters() if p.requires_grad)
            assert (report.trainable, report.total) == (adapters, whole + adapters)
            assert (report.model, report.injected, len(report.adapted)) == ("model", True, 14)
            assert report.quantised == (report.adapted if kind else ())
            assert apply_adapters(holder, settings, compute_dtype=torch.float32) is report
    assert "14 layers of model have adapters, 14 of them quantised" in str(report)


def test_other_settings_on_a_second_call_are_refused(tmp_path) -> None:
    holder = Holder(tiny_model(layers=1))
    apply_adapters(holder, AdapterSettings(LORA), compute_dtype=torch.float32)
    with pytest.raises(ModelError, match="holds adapters already"):
        apply_adapters(holder, AdapterSettings(LoraSettings(r=8)), compute_dtype=torch.float32)
    assert apply_adapters(holder, AdapterSettings(), compute_dtype=torch.float32).trainable > 0


def test_every_name_of_the_model_is_its_wrapper() -> None:
    model = tiny_model(layers=1)
    holder = Holder(model)
    holder.again = model
    holder.inner = nn.ModuleDict({"part": model, "backbone": model.model})
    apply_adapters(holder, AdapterSettings(LORA), compute_dtype=torch.float32)
    assert holder.model is holder.again is holder.inner["part"]
    assert holder.model.get_base_model() is model
    assert holder.inner["backbone"] is model.model


def groups(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Parameter groups by numbers of trainable and of frozen parameters, each with a rate of its own."""
    made = []
    for number, (trainable, frozen) in enumerate(sizes):
        parameters = [nn.Parameter(torch.ones(2), requires_grad=i < trainable) for i in range(trainable + frozen)]
        made.append({"params": parameters, "lr": 10.0**-number, "weight_decay": float(number)})
    return made


def test_frozen_parameters_leave_the_optimizer() -> None:
    optimizer = torch.optim.AdamW(groups((2, 1), (0, 3), (1, 0)))
    kept = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    assert keep_trainable(optimizer) == 4
    assert [p for group in optimizer.param_groups for p in group["params"]] == kept
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1.0, 0.0), (0.01, 2.0)]
    assert keep_trainable(optimizer) == 0


def test_nothing_trainable_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="all 3 are frozen"):
        keep_trainable(torch.optim.SGD(groups((0, 2), (0, 1))))


SCHEDULES: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 2.0, lambda s: 3.0, lambda s: 1.0 / (s + 1)]),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [1.0, 2.0, 3.0], total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, [0.1, 0.2, 0.3], [1.0, 2.0, 3.0], 2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=[1e-3, 1e-4, 1e-5]),
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_go_on_for_the_groups_that_are_left(name: str) -> None:
    def rates(*, filtered: bool) -> list[list[float]]:
        optimizer = torch.optim.SGD(groups((1, 1), (0, 2), (2, 0)), momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        if filtered:
            keep_trainable(optimizer, [schedule])
        found = []
        for _ in range(6):
            optimizer.step()
            schedule.step(*([1.0] if name == "plateau" else []))
            found.append([float(group["lr"]) for group in optimizer.param_groups])
        return found

    assert rates(filtered=True) == [[first, last] for first, _, last in rates(filtered=False)]
