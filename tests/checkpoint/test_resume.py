"""N steps are k steps, a stop, a resume and N-k steps: bitwise on the same ranks, and the same state on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.checkpoint.runs import CASES, LoRA, SaveAt, Scheduled, digests, fit, mean_losses
from tests.harness.ranks import ranks, run_ranks

STOP, END = 3, 5


def straight(case: str, save: Path | None) -> dict[str, Any]:
    """Train to the end without a stop; save on the way if asked."""
    module = CASES[case]()
    trainer = fit(module, steps=END, callbacks=[SaveAt(save, STOP)] if save else [])
    return {"state": digests(trainer), "losses": mean_losses(module), "rates": rates(trainer)}


def stopped(case: str, save: Path) -> dict[str, str]:
    return digests(fit(CASES[case](), steps=STOP, save=save))


def resumed(case: str, path: Path, steps: int = END, **strategy: Any) -> dict[str, Any]:
    module = CASES[case]()
    trainer = fit(module, steps=steps, ckpt_path=path, strategy=lambda: FSDPBF16Strategy("32-true", **strategy))
    return {"state": digests(trainer), "losses": mean_losses(module), "rates": rates(trainer)}


def loaded_and_resumed(path: Path, **strategy: Any) -> list[dict[str, Any]]:
    return [resumed("tied", path, steps, **strategy) for steps in (STOP, END)]


def rates(trainer: Any) -> list[float]:
    return [group["lr"] for optimizer in trainer.strategy.optimizers for group in optimizer.param_groups]


@ranks(2)
@pytest.mark.parametrize(
    "cases", [("llama", "tied", "frozen"), ("groups", "sgd", "momentum"), ("unused", "lora")], ids=" ".join
)
def test_resuming_on_the_same_ranks_is_bitwise_equal(cases: tuple[str, ...], tmp_path: Path) -> None:
    # Several in one process, because starting one costs more than training does.
    for case in cases:
        path = tmp_path / f"{case}.ckpt"
        whole = straight(case, path)
        later = resumed(case, path)
        assert later["losses"] == whole["losses"][STOP:], (case, later["losses"], whole["losses"])
        assert later["rates"] == whole["rates"], case
        changed = [name for name in whole["state"] if later["state"].get(name) != whole["state"][name]]
        assert not changed, (case, changed[:5])
        assert later["state"].keys() == whole["state"].keys(), case


@ranks(2)
def test_bf16_resumes_bitwise_with_fp32_masters(tmp_path: Path) -> None:
    def strategy() -> FSDPBF16Strategy:
        return FSDPBF16Strategy()

    module = Scheduled(layers=2)
    whole = digests(fit(module, steps=END, strategy=strategy))
    fit(Scheduled(layers=2), steps=STOP, save=tmp_path / "stop.ckpt", strategy=strategy)
    later = Scheduled(layers=2)
    state = digests(fit(later, steps=END, ckpt_path=tmp_path / "stop.ckpt", strategy=strategy))
    assert mean_losses(later) == mean_losses(module)[STOP:]
    assert state == whole
    assert all("float32" in value for name, value in state.items() if ".exp_avg" in name)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, str]]:
    path = tmp_path_factory.mktemp("two") / "stop.ckpt"
    whole = run_ranks(straight, 2, ("tied", path))
    return path, whole, run_ranks(resumed, 2, ("tied", path, STOP))["state"]


@pytest.mark.parametrize(
    ("size", "strategy"),
    [(1, {}), (4, {}), (4, {"data_parallel_shard": 2, "data_parallel_replicate": 2})],
    ids=["1", "4", "hybrid 2x2"],
)
def test_other_ranks_load_the_same_state_and_go_on(
    on_two: tuple[Path, dict[str, Any], dict[str, str]], size: int, strategy: dict[str, Any]
) -> None:
    path, whole, state = on_two
    loaded, later = run_ranks(loaded_and_resumed, size, (path,), strategy)
    assert loaded["state"] == state
    # Sums over ranks are formed in another order; two steps of AdamW at lr 5e-3 turn float32 rounding (6e-8) into
    # 1e-6 of a loss near 5.5, and the parity tests allow 3e-5 after twenty.
    assert later["losses"] == pytest.approx(whole["losses"][STOP:], abs=3e-5)
    assert later["rates"] == whole["rates"]


def test_four_ranks_to_fewer(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    state = run_ranks(stopped, 4, ("groups", path))
    for size in (2, 1):
        assert run_ranks(resumed, size, ("groups", path, STOP))["state"] == state, size


@ranks(2)
def test_a_run_goes_on_from_a_checkpoint_it_was_resumed_from_twice(tmp_path: Path) -> None:
    whole = straight("llama", None)
    stopped("llama", tmp_path / "one.ckpt")
    fit(CASES["llama"](), steps=STOP, ckpt_path=tmp_path / "one.ckpt", save=None)
    later = resumed("llama", tmp_path / "one.ckpt")
    assert later["state"] == whole["state"]


@ranks(2)
def test_adapters_are_described_and_the_base_is_kept(tmp_path: Path) -> None:
    from lightning_swift.checkpoint.layout import read_manifest

    path = tmp_path / "lora.ckpt"
    fit(LoRA(layers=2), steps=STOP, save=path)
    manifest = read_manifest(path)
    assert manifest.huggingface == "model"
    assert manifest.adapters is not None
    assert manifest.adapters["default"]["r"] == 4
    assert manifest.adapters["default"]["peft_type"] == "LORA"
    assert any(".lora_A." in name for name in manifest.tensors)
    assert any(name.endswith("q_proj.base_layer.weight") for name in manifest.tensors)
