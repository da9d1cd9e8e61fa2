"""Lightning's own ways to save and resume, with an unchanged ModelCheckpoint, Trainer and LightningModule."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_swift.checkpoint.layout import MANIFEST, read_manifest
from lightning_swift.checkpoint.safe_load import verify
from lightning_swift.checkpoint.sharded import load_meta
from lightning_swift.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    UnsafeCheckpointError,
)
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.checkpoint.runs import Momentum, Scheduled, Unused, batches, digests, fit, mean_losses
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer
from tests.harness.ranks import ranks


def names(directory: Path) -> list[str]:
    # Only rank 0 deletes, and nobody waits for it; nor may it go on while the others look.
    torch.distributed.barrier()
    found = sorted(entry.name for entry in directory.iterdir())
    torch.distributed.barrier()
    return found


def weights(trainer: L.Trainer) -> dict[str, str]:
    return {name: value for name, value in digests(trainer).items() if name.startswith("model.")}


@ranks(2)
def test_top_k_by_a_logged_value_keeps_the_best(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="loss", mode="min", save_top_k=2, every_n_train_steps=1)
    fit(Scheduled(layers=1), steps=6, callbacks=[callback], enable_checkpointing=True)
    assert len(names(tmp_path)) == 2
    assert sorted(Path(path).name for path in callback.best_k_models) == names(tmp_path)
    for name in names(tmp_path):
        verify(tmp_path / name)


@ranks(2)
def test_save_last_is_replaced_as_a_whole_and_resumed(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="step", mode="max", save_last=True, every_n_train_steps=3)
    whole = digests(fit(Scheduled(layers=1), steps=6, callbacks=[callback], enable_checkpointing=True))
    assert read_manifest(tmp_path / "last.ckpt").global_step == 6
    assert names(tmp_path) == ["epoch=1-step=6.ckpt", "last.ckpt"]
    again = fit(Scheduled(layers=1), steps=6, ckpt_path=tmp_path / "last.ckpt")
    assert digests(again) == whole


@ranks(2)
def test_save_last_as_a_link(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="step", mode="max", save_last="link", every_n_train_steps=2)
    whole = digests(fit(Scheduled(layers=1), steps=6, callbacks=[callback], enable_checkpointing=True))
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=1-step=6.ckpt")
    assert names(tmp_path) == ["epoch=1-step=6.ckpt", "last.ckpt"]
    assert digests(fit(Scheduled(layers=1), steps=6, ckpt_path=tmp_path / "last.ckpt")) == whole


@ranks(2)
def test_weights_alone_start_a_fit_afresh(tmp_path: Path) -> None:
    first = fit(Momentum(layers=1), steps=3)
    first.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    assert read_manifest(tmp_path / "w.ckpt").weights_only
    assert not any(name.startswith("optimizer") for name in read_manifest(tmp_path / "w.ckpt").tensors)
    # No step left to take: what has been loaded can be looked at.
    loaded = fit(Momentum(layers=1), steps=0, ckpt_path=tmp_path / "w.ckpt")
    assert weights(loaded) == weights(first)
    module = Momentum(layers=1)
    trainer = fit(module, steps=2, ckpt_path=tmp_path / "w.ckpt")
    assert trainer.global_step == 2
    assert len(module.losses) == 2
    # A run of its own: it must not be taken for a continuation of the first.
    trainer.save_checkpoint(tmp_path / "next.ckpt")
    assert read_manifest(tmp_path / "next.ckpt").run != read_manifest(tmp_path / "w.ckpt").run


@ranks(2)
def test_evaluation_loads_the_weights(tmp_path: Path) -> None:
    trained = fit(Scheduled(layers=1), steps=3, save=tmp_path / "a.ckpt")
    for run in ("validate", "test", "predict"):
        module = Evaluated(lr=1.0, layers=1)
        trainer = quiet_trainer(strategy=FSDPBF16Strategy("32-true"))
        getattr(trainer, run)(
            module, batches(), ckpt_path=tmp_path / "a.ckpt", **({"verbose": False} if run != "predict" else {})
        )
        assert weights(trainer) == weights(trained), run
        assert module.seen == 3, run


class Evaluated(UserModule):
    seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.model(**batch, use_cache=False)

    test_step = predict_step = validation_step


@ranks(2)
def test_newest_starts_afresh_then_resumes_and_evaluation_without_one_is_an_error(tmp_path: Path) -> None:
    def callback() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "run", every_n_train_steps=3, save_top_k=-1)

    first = Hooked(layers=1)
    fit(first, steps=3, ckpt_path="newest", callbacks=[callback()], enable_checkpointing=True)
    assert first.loads == 0
    assert len(first.losses) == 3
    second = Hooked(layers=1)
    trainer = fit(second, steps=6, ckpt_path="newest", callbacks=[callback()], enable_checkpointing=True)
    assert second.loads == 1
    assert len(second.losses) == 3
    assert Path(str(trainer.ckpt_path)).name == "epoch=0-step=3.ckpt"
    runs = {read_manifest(path).run for path in (tmp_path / "run").iterdir()}
    assert len(runs) == 1
    empty = ModelCheckpoint(tmp_path / "none")
    trainer = quiet_trainer(strategy=FSDPBF16Strategy("32-true"), callbacks=[empty], enable_checkpointing=True)
    with pytest.raises(CheckpointNotFoundError, match=r"none: there is no whole checkpoint\."):
        trainer.validate(Hooked(layers=1), batches(), ckpt_path="newest", verbose=False)
    with pytest.raises(ConfigurationError, match="the Trainer has none"):
        fit(Hooked(layers=1), steps=1, ckpt_path="newest")


class Hooked(Scheduled):
    """Counts how often Lightning restores, and would fail on a checkpoint without its own entry."""

    loads = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loads += checkpoint["mine"]


@ranks(2)
def test_a_fit_from_an_earlier_step_is_a_branch_with_a_run_of_its_own(tmp_path: Path) -> None:
    def callback() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")

    fit(Scheduled(layers=1), steps=3, callbacks=[callback()], enable_checkpointing=True)
    fit(
        Scheduled(layers=1),
        steps=2,
        ckpt_path=tmp_path / "step=1.ckpt",
        callbacks=[callback()],
        enable_checkpointing=True,
    )
    assert names(tmp_path) == ["step=1.ckpt", "step=2-v1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    resumed = fit(Scheduled(layers=1), steps=2, ckpt_path="newest", callbacks=[callback()], enable_checkpointing=True)
    assert Path(str(resumed.ckpt_path)).name == "step=2-v1.ckpt"


class Trimmed(UserModule):
    """Leaves the embedding out of its checkpoints and renames another weight."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["model.model.embed_tokens.weight"]
        state["norm"] = state.pop("model.model.norm.weight")


@ranks(2)
def test_names_that_the_user_trims_or_renames_are_respected(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    trained = fit(Trimmed(), steps=3, save=path)
    stored = read_manifest(path).tensors
    assert "model.norm" in stored
    assert not {"model.model.model.embed_tokens.weight", "model.model.model.norm.weight"} & stored.keys()
    with pytest.raises(
        CheckpointMismatchError, match=r"2 missing .*embed_tokens.*1 in the checkpoint only \(model\.norm\)"
    ):
        fit(Trimmed(), steps=3, ckpt_path=path)
    module = Trimmed()
    module.strict_loading = False
    loaded = fit(module, steps=3, ckpt_path=path)
    own, expected = digests(loaded), digests(trained)
    different = {name for name in expected if own[name] != expected[name]}
    assert different == {"model.model.model.embed_tokens.weight", "model.model.model.norm.weight"}


@ranks(2)
def test_a_model_that_has_grown_loads_partly_only_when_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit(UserModule(layers=1), steps=3, save=path)
    with pytest.raises(CheckpointMismatchError, match=r"6 missing .*model\.head\.bias.*nothing was loaded|model\.head"):
        fit(Unused(layers=1), steps=6, ckpt_path=path)
    module = Unused(layers=1)
    module.strict_loading = False
    fit(module, steps=6, ckpt_path=path)
    assert len(module.losses) == 3


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Options:
    depth: int
    path: Path


class Opaque:
    pass


class WithParameters(UserModule):
    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


@ranks(2)
def test_hyper_parameters_become_plain_data_and_the_rest_is_left_out_with_a_warning(tmp_path: Path) -> None:
    module = WithParameters(
        path=Path("data"),
        colour=Colour.RED,
        scale=np.float32(0.5),
        options=Options(3, Path("x")),
        space=argparse.Namespace(a=[Path("y")]),
        dtype=torch.bfloat16,
        opaque=Opaque(),
    )
    trainer = quiet_trainer(strategy=FSDPBF16Strategy("32-true"), max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    said = [str(w.message) for w in caught if "left out of checkpoints" in str(w.message)]
    assert len(said) == (1 if os.environ["RANK"] == "0" else 0)
    assert all("'opaque'" in text for text in said)
    assert load_meta(tmp_path / "a.ckpt")["hyper_parameters"] == {
        "path": "data",
        "colour": "red",
        "scale": 0.5,
        "options": {"depth": 3, "path": "x"},
        "space": {"a": ["y"]},
        "dtype": torch.bfloat16,
    }
    again = quiet_trainer(strategy=FSDPBF16Strategy("32-true"), max_steps=2)
    again.fit(WithParameters(opaque=Opaque()), batches(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert again.global_step == 2


class Careless(UserModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"deep": [1, Opaque()]}


@ranks(2)
def test_other_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    trainer = fit(Careless(), steps=1)
    with pytest.raises(UnsafeCheckpointError, match=r"checkpoint\['mine'\]\['deep'\]\[1\].*Opaque.*add_safe_globals"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert names(tmp_path) == []


@ranks(2)
def test_an_ordinary_file_is_a_start(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    if os.environ["RANK"] == "0":
        write_plain_file(path, weights_only=False)
        write_plain_file(tmp_path / "weights.ckpt", weights_only=True)
    torch.distributed.barrier()
    plain = torch.load(path, weights_only=True)
    module = Scheduled("qwen3", layers=1)
    trainer = fit(module, steps=3, ckpt_path=path)
    assert trainer.global_step == 3
    assert module.losses == []
    own = trainer.strategy.optimizer_state(trainer.optimizers[0])
    for number, name in enumerate(n for n, _ in module.named_parameters()):
        assert torch.equal(module.state_dict()[name].full_tensor(), plain["state_dict"][name])
        saved = plain["optimizer_states"][0]["state"][number]["exp_avg_sq"]
        assert torch.equal(own[f"state.{name}.exp_avg_sq"].full_tensor(), saved)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    fresh = fit(Scheduled("qwen3", layers=1), steps=1, ckpt_path=tmp_path / "weights.ckpt")
    assert fresh.global_step == 1


def write_plain_file(path: Path, *, weights_only: bool) -> None:
    """What a run of one process with Lightning's own strategy leaves."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.endswith(("RANK", "WORLD_SIZE"))}
    kept |= {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TORCHELASTIC")}
    try:
        trainer = quiet_trainer(max_steps=3, devices=1, strategy="auto")
        trainer.fit(Scheduled("qwen3", layers=1), loader(Tokens(24), batch_size=8))
        trainer.save_checkpoint(path, weights_only=weights_only)
    finally:
        os.environ.update(kept)


@ranks(2)
def test_a_sharded_directory_of_lightnings_own_is_refused_with_the_way_out(tmp_path: Path) -> None:
    if os.environ["RANK"] == "0":
        (tmp_path / "theirs.ckpt").mkdir()
        torch.save({"epoch": 1}, tmp_path / "theirs.ckpt" / "meta.pt")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"of another strategy.*consolidate_checkpoint"):
        fit(UserModule(layers=1), steps=1, ckpt_path=tmp_path / "theirs.ckpt")


@ranks(2)
def test_a_damaged_file_is_named_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit(UserModule(layers=1), steps=1, save=path)
    if os.environ["RANK"] == "0":
        with (path / "__1_0.distcp").open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is not as it was saved"):
        fit(UserModule(layers=1), steps=2, ckpt_path=path)


@ranks(2)
def test_hugging_face_files_go_with_the_checkpoint(tmp_path: Path) -> None:
    fit(Scheduled("qwen3", layers=1), steps=1, save=tmp_path / "a.ckpt")
    manifest = read_manifest(tmp_path / "a.ckpt")
    assert manifest.huggingface == "model"
    assert {"huggingface/config.json", "huggingface/generation_config.json"} <= manifest.files.keys()
    assert manifest.tied == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    assert "model.model.lm_head.weight" not in manifest.tensors
    assert manifest.mesh == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 1}
    assert manifest.strategy == "FSDPBF16Strategy"


@ranks(2)
def test_a_name_that_is_taken_is_an_error_but_no_training_is_lost(tmp_path: Path) -> None:
    fit(Scheduled(layers=1), steps=1, save=tmp_path / "final.ckpt")
    before = read_manifest(tmp_path / "final.ckpt")
    trainer = fit(Scheduled(layers=1), steps=2)
    with pytest.raises(CheckpointError, match=r"another run .*Saved as final-v1\.ckpt instead"):
        trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert names(tmp_path) == ["final-v1.ckpt", "final.ckpt"]
    assert read_manifest(tmp_path / "final.ckpt") == before
    assert verify(tmp_path / "final-v1.ckpt").global_step == 2
    if trainer.is_global_zero:
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "text").write_text("x")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"not a checkpoint is here.*Saved as notes-v1 instead"):
        trainer.save_checkpoint(tmp_path / "notes")
    assert (tmp_path / "notes" / "text").read_text() == "x"


class Counted(L.LightningDataModule):
    samples_seen = 17

    def train_dataloader(self) -> Any:
        return batches()


@ranks(2)
def test_the_data_module_tells_how_many_samples_were_seen(tmp_path: Path) -> None:
    fit(UserModule(layers=1), steps=1, save=tmp_path / "a.ckpt", data=Counted())
    assert read_manifest(tmp_path / "a.ckpt").samples_seen == 17


@ranks(2)
def test_only_checkpoints_are_removed_and_options_of_other_writers_refused(tmp_path: Path) -> None:
    trainer = fit(UserModule(layers=1), steps=1, save=tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options={})
    trainer.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert names(tmp_path) == []
    (tmp_path / "notes").mkdir(exist_ok=True)
    (tmp_path / "notes" / "text").write_text("x")
    if trainer.is_global_zero:
        with pytest.raises(CheckpointError, match="not deleted"):
            trainer.strategy.remove_checkpoint(tmp_path / "notes")


@ranks(2)
def test_the_same_losses_after_a_stop_with_a_validation_loop(tmp_path: Path) -> None:
    def run(module: UserModule, steps: int, **kwargs: Any) -> L.Trainer:
        callback = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
        trainer = quiet_trainer(
            strategy=FSDPBF16Strategy("32-true"), max_steps=steps, callbacks=[callback], enable_checkpointing=True
        )
        trainer.fit(module, batches(), batches(), **kwargs)
        return trainer

    whole = Scheduled(layers=1)
    run(whole, 6)
    later = Scheduled(layers=1)
    run(later, 6, ckpt_path=tmp_path / "epoch=0-step=3.ckpt")
    assert mean_losses(later) == mean_losses(whole)[3:]
    assert (tmp_path / "epoch=0-step=3.ckpt" / MANIFEST).is_file()
