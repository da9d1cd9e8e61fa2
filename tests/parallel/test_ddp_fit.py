"""What surrounds the training steps under DDPBF16Strategy: evaluation, callbacks, loading, saving, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from lightning_swift import CausalLM
from lightning_swift.callbacks import ExportForInference, ShardedCheckpoint
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.strategies._ddp_precision import DDPPrecision
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.checkpoint.runs import CASES, SaveAt, digests, mean_losses
from tests.checkpoint.runs import fit as run
from tests.harness.exports import reload_here
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer, save_tiny_model
from tests.harness.ranks import ranks, run_ranks
from tests.parallel.references import fit

STOP, END = 3, 5


def data(n: int = 16) -> Any:
    return loader(Tokens(n), batch_size=4, rank=dist.get_rank(), world_size=dist.get_world_size())


class Evaluates(UserModule):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input_ids"]).logits.argmax(-1)


@ranks(2)
def test_validation_before_within_and_after_training_changes_nothing() -> None:
    expected = fit(UserModule(), DDPBF16Strategy(), steps=6)[0].losses
    module = Evaluates()
    trainer = quiet_trainer(strategy=DDPBF16Strategy(), max_steps=6, num_sanity_val_steps=2, val_check_interval=2)
    before = trainer.validate(module, data(), verbose=False)
    trainer.fit(module, data(64), data())
    assert module.losses == expected
    after = trainer.validate(module, data(), verbose=False)
    tested = trainer.test(module, data(), verbose=False)
    assert before[0]["val_loss"] > after[0]["val_loss"] == tested[0]["val_loss"]
    assert trainer.predict(module, data(8))[0].shape == (4, 32)
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(module, data(64), data())
    assert len(module.losses) == 8


@ranks(2)
def callbacks_work(folder: Path) -> None:
    stop = EarlyStopping("val_loss", patience=1, mode="max")
    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1, filename="{step}")
    shards = ShardedCheckpoint(dirpath=folder / "kept", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=DDPBF16Strategy(),
        max_epochs=6,
        max_steps=12,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[stop, best, shards],
    )
    trainer.fit(UserModule(), data(16), data(8))
    # A loss that falls does not rise, so it stops after the second evaluation that is no better than the first.
    assert 4 <= trainer.global_step < 12
    assert Path(best.best_model_path).is_dir()
    assert read_manifest(Path(best.best_model_path)).strategy == "DDPBF16Strategy"
    assert read_manifest(Path(best.best_model_path)).mesh["dp_replicate"] == 2
    assert len(list((folder / "kept").glob("*.ckpt"))) == trainer.global_step // 2
    resumed = quiet_trainer(strategy=DDPBF16Strategy(), max_steps=trainer.global_step + 1)
    resumed.fit(UserModule(), data(16), data(8), ckpt_path=best.best_model_path)
    assert resumed.global_step == trainer.global_step + 1


def test_callbacks_work(tmp_path: Path) -> None:
    callbacks_work(tmp_path)


@ranks(2)
def exports(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = CausalLM(str(folder / "model"))
    trainer = quiet_trainer(
        strategy=DDPBF16Strategy(),
        max_steps=2,
        limit_val_batches=0,
        callbacks=[ExportForInference(folder / "exported", dtype="float32")],
    )
    weights: dict[str, Any] = {}

    class Last(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            weights.update({name: p.detach().clone() for name, p in pl_module.model.named_parameters()})

    trainer.callbacks.append(Last())
    with reload_here():
        trainer.fit(model, data(16))
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder / "exported").named_parameters())
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight), name


def test_lazy_weights_are_read_trained_and_exported(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    exports(tmp_path)


@ranks(2)
def lazy_is_eager(folder: str) -> None:
    class Lazy(UserModule):
        def configure_model(self) -> None:
            from lightning_swift import lazy_pretrained

            if self.model is None:
                self.model = lazy_pretrained(folder).train()

    for precision in ("32-true", "bf16-mixed"):
        lazy = fit(Lazy(), DDPBF16Strategy(precision), steps=4)[0].losses
        assert lazy == fit(UserModule(folder=folder), DDPBF16Strategy(precision), steps=4)[0].losses
    assert quiet_trainer(strategy=DDPBF16Strategy()).validate(Lazy(), data(8), verbose=False)


def test_a_lazy_model_is_the_eager_one(tmp_path: Path) -> None:
    lazy_is_eager(str(save_tiny_model(tmp_path / "model", "qwen3")))


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPBF16Strategy("32-true"),
    "fsdp": lambda: FSDPBF16Strategy("32-true"),
}


def straight(case: str, name: str, path: Path | None) -> dict[str, Any]:
    module = CASES[case]()
    trainer = run(module, steps=END, strategy=STRATEGIES[name], callbacks=[SaveAt(path, STOP)] if path else [])
    return {"state": digests(trainer), "losses": mean_losses(module)}


def resumed(case: str, name: str, path: Path, steps: int = END) -> dict[str, Any]:
    module = CASES[case]()
    trainer = run(module, steps=steps, ckpt_path=path, strategy=STRATEGIES[name])
    return {"state": digests(trainer), "losses": mean_losses(module)}


def loaded_and_resumed(name: str, path: Path) -> list[dict[str, Any]]:
    return [resumed("tied", name, path, steps) for steps in (STOP, END)]


@ranks(2)
def same_ranks(folder: Path) -> None:
    for case in ("tied", "frozen", "lora"):
        whole = straight(case, "ddp", folder / f"{case}.ckpt")
        for name in ("fsdp", "ddp"):
            later = resumed(case, name, folder / f"{case}.ckpt")
            # At two ranks DDP and FSDP2 are bitwise equal in float32, so a resume under either is too.
            assert later["losses"] == whole["losses"][STOP:], (case, name)
            assert later["state"] == whole["state"], (case, name)
        straight(case, "fsdp", folder / f"{case}-fsdp.ckpt")
        assert resumed(case, "ddp", folder / f"{case}-fsdp.ckpt") == later


@pytest.mark.slow
def test_ddp_and_fsdp_resume_each_other_bitwise(tmp_path: Path) -> None:
    same_ranks(tmp_path)


@pytest.mark.slow
def test_other_numbers_of_ranks_load_the_same_state(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    whole = run_ranks(straight, 2, ("tied", "ddp", path))
    state = run_ranks(resumed, 2, ("tied", "ddp", path, STOP))["state"]
    for size, name in ((1, "ddp"), (4, "fsdp")):
        loaded, later = run_ranks(loaded_and_resumed, size, (name, path))
        assert loaded["state"] == state
        # As in test_resume: sums over ranks in another order, two steps of AdamW later.
        assert later["losses"] == pytest.approx(whole["losses"][STOP:], abs=3e-5)


@ranks(2)
def bf16_resume(folder: Path) -> None:
    for options in ({}, {"compression": "fp16"}, {"lora": True}, {"lora": True, "quantization": "nf4"}):
        from lightning_swift.adapters.settings import LoraSettings

        settings = {**options, "lora": LoraSettings(r=4) if options.get("lora") else None}
        path = folder / f"{'-'.join(map(str, options))}.ckpt"

        def strategy(settings: Any = settings) -> DDPBF16Strategy:
            return DDPBF16Strategy(**settings)

        module = CASES["llama"]()
        whole = digests(run(module, steps=END, strategy=strategy, callbacks=[SaveAt(path, STOP)]))
        later = CASES["llama"]()
        state = digests(run(later, steps=END, ckpt_path=path, strategy=strategy))
        assert mean_losses(later) == mean_losses(module)[STOP:], options
        assert state == whole, options


def test_bf16_compressed_and_adapted_runs_resume_bitwise(tmp_path: Path) -> None:
    bf16_resume(tmp_path)


@ranks(2)
def test_unused_parameters_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        fit(CASES["unused"](), DDPBF16Strategy(), steps=3)
    assert any("find_unused_parameters=True" in note for note in caught.value.__notes__)
    fit(CASES["unused"](), DDPBF16Strategy(find_unused_parameters=True), steps=3)


@ranks(2)
def test_models_that_cannot_be_trained_are_refused() -> None:
    module = UserModule()
    module.configure_model()
    module.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter is trainable"):
        fit(module, DDPBF16Strategy(), steps=1)

    class Empty(UserModule):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.model = nn.Linear(2, 2)

    with pytest.raises(ModelError, match=r"model\.weight"):
        fit(Empty(), DDPBF16Strategy(), steps=1)
    module, _ = fit(UserModule(), FSDPBF16Strategy(), steps=1)
    with pytest.raises(ModelError, match="sharded already"):
        fit(module, DDPBF16Strategy(), steps=1)


@pytest.mark.parametrize(
    ("own", "asked"), [("bf16-mixed", "bf16-true"), ("32-true", "bf16-mixed"), ("bf16-true", "bf16-mixed")]
)
def test_a_trainer_that_asks_for_another_precision_is_refused(own: Any, asked: Any) -> None:
    with pytest.raises(ConfigurationError, match=f'"{own}"'):
        quiet_trainer(strategy=DDPBF16Strategy(own), devices=1, precision=asked)


@pytest.mark.parametrize(
    ("asked", "used"), [(None, "bf16-mixed"), ("bf16-mixed", "bf16-mixed"), ("bf16-true", "bf16-true")]
)
def test_a_registered_name_means_bf16(asked: Any, used: str) -> None:
    trainer = quiet_trainer(strategy="swift_ddp", devices=1, precision=asked)
    assert trainer.precision == used
    assert type(trainer.strategy.precision_plugin) is DDPPrecision


@pytest.mark.parametrize(
    "options",
    [{"precision": "16-mixed"}, {"bucket_cap_mb": 0}, {"timeout": -1.0}, {"compile": "inductr"}],
)
def test_values_that_are_not_allowed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        DDPBF16Strategy(**options)
