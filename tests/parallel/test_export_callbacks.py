"""What a fit leaves behind: an exported folder that is the trained model, a merged checkpoint, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_swift.callbacks import ExportForInference, MergeShardedCheckpoint, ShardedCheckpoint
from lightning_swift.callbacks import export as export_callback
from lightning_swift.callbacks import merge as merge_callback
from lightning_swift.checkpoint.export import export_checkpoint
from lightning_swift.checkpoint.export_ranks import patient_ranks
from lightning_swift.errors import CheckpointError, ConfigurationError, ExportError
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.exports import reload_here
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer
from tests.harness.ranks import ranks
from tests.harness.tokenizers import tiny_tokenizer


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fit(*callbacks: L.Callback, module: L.LightningModule | None = None, steps: int = 2, **trainer: Any) -> Any:
    """Train a little; returns the Trainer."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    # Lightning warns of a module with a validation_step and no data for it.
    trainer = quiet_trainer(callbacks=list(callbacks), max_steps=steps, limit_val_batches=0, **trainer)
    data = loader(Tokens(16), batch_size=4, rank=rank(), world_size=size)
    with reload_here():
        trainer.fit(module or UserModule(layers=2), data, data)
    return trainer


class FinalWeights(L.Callback):
    """Gathers the final weights of the model; comes last, so that it sees what the other callbacks leave."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for name, value in pl_module.model.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            self.weights[name] = value.detach().clone()
        assert pl_module.training


def assert_folder_is(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == dtype
    state = loaded.state_dict()
    assert state.keys() == weights.keys()
    assert [name for name in state if not torch.equal(state[name], weights[name].to(dtype))] == []


PRECISIONS = [("32-true", None), ("bf16-mixed", None), ("bf16-true", "bfloat16")]
PRECISIONS += [("32-true", "bfloat16"), ("bf16-mixed", "bfloat16"), ("bf16-mixed", "float16")]


@pytest.mark.parametrize("cases", [PRECISIONS[:3], PRECISIONS[3:]], ids=["as it is", "rounded"])
@ranks(2)
def test_a_sharded_fit_is_exported_bit_for_bit(cases: list[tuple[Any, Any]], tmp_path: Path) -> None:
    for precision, dtype in cases:
        check_exported(precision, dtype, tmp_path / f"{precision} {dtype}")


def check_exported(precision: Any, dtype: Any, folder: Path) -> None:
    export = ExportForInference(str(folder / "out"), dtype=dtype)
    before, final = FinalWeights(), FinalWeights()
    fit(before, export, final, module=UserModule(layers=2), strategy=FSDPBF16Strategy(precision))
    assert [n for n, w in before.weights.items() if not torch.equal(w, final.weights[n])] == [], (
        "the model is as it was"
    )
    assert export.report is not None
    assert (export.report.max_logit_gap, export.report.tokens) == (0, 64)
    # Checked in the dtype the trained model computes in.
    assert export.report.dtype == ("float32" if precision == "32-true" else "bfloat16")
    own = torch.bfloat16 if precision == "bf16-true" else torch.float32
    if rank() == 0:
        assert_folder_is(folder / "out", final.weights, own if dtype is None else getattr(torch, dtype))
        assert [p.name for p in folder.iterdir()] == ["out"], "the checkpoint made for it is gone"


@ranks(2)
def test_other_architectures(tmp_path: Path) -> None:
    for kind in ("qwen3", "gemma", "gpt2"):
        export = ExportForInference(str(tmp_path / kind))
        fit(export, module=UserModule(kind, layers=2), strategy=FSDPBF16Strategy())
        assert export.report is not None
        assert export.report.max_logit_gap == 0, kind


class Adapted(UserModule):
    """peft adapters made by the user."""

    def configure_model(self) -> None:
        if self.model is None:
            from peft import LoraConfig, get_peft_model

            super().configure_model()
            torch.manual_seed(3)
            self.model = get_peft_model(self.model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)


@ranks(2)
def test_adapters_merged_or_alone(tmp_path: Path) -> None:
    from tests.harness.models import save_tiny_model

    if rank() == 0:
        save_tiny_model(tmp_path / "base", layers=2)
    dist.barrier()
    for name, strategy in (("fsdp", FSDPBF16Strategy("32-true")), ("ddp", "ddp")):
        merged = ExportForInference(str(tmp_path / name / "merged"), dtype=None)
        alone = ExportForInference(str(tmp_path / name / "alone"), format="adapter")
        fit(merged, alone, module=Adapted(folder=str(tmp_path / "base")), strategy=strategy)
        assert merged.report is not None
        assert alone.report is not None
        assert alone.report.max_logit_gap == 0
        # The bound is that of test_export: float32 sums in another order.
        assert 0 < merged.report.max_logit_gap < 5e-6
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(alone.report.files)


@ranks(2)
def test_ddp_is_exported_bit_for_bit(tmp_path: Path) -> None:
    for dtype in (None, "bfloat16"):
        export, final = ExportForInference(str(tmp_path / str(dtype)), dtype=dtype), FinalWeights()
        fit(export, final, strategy="ddp", precision="bf16-mixed", module=UserModule("qwen3", layers=2))
        assert export.report is not None
        assert export.report.max_logit_gap == 0
        if rank() == 0:
            assert_folder_is(tmp_path / str(dtype), final.weights, torch.float32 if dtype is None else torch.bfloat16)


def test_a_single_device_with_tokenizer_and_generation_settings(tmp_path: Path) -> None:
    class WithTokenizer(UserModule):
        def configure_model(self) -> None:
            super().configure_model()
            self.tokenizer = tiny_tokenizer()
            self.model.generation_config.max_new_tokens = 7

    export, final = ExportForInference(str(tmp_path / "out")), FinalWeights()
    fit(export, final, module=WithTokenizer(vocab=len(tiny_tokenizer())))
    assert_folder_is(tmp_path / "out", final.weights, torch.bfloat16)
    from transformers import AutoTokenizer, GenerationConfig

    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny_tokenizer().chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 7


@ranks(2)
def test_tokenizer_of_the_data_module_goes_along(tmp_path: Path) -> None:
    class Data(L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tiny_tokenizer()

        def train_dataloader(self) -> Any:
            return loader(Tokens(16), batch_size=4, rank=rank(), world_size=2)

    trainer = quiet_trainer(
        max_steps=1, strategy=FSDPBF16Strategy(), callbacks=[ExportForInference(str(tmp_path / "out"), verify=False)]
    )
    trainer.fit(UserModule(), Data())
    if rank() == 0:
        assert "tokenizer_config.json" in {p.name for p in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("kind", [ShardedCheckpoint, ModelCheckpoint])
@ranks(2)
def test_a_checkpoint_of_the_last_step_is_used(kind: Any, tmp_path: Path) -> None:
    saver = kind(dirpath=str(tmp_path / "runs"), every_n_train_steps=1)
    export = ExportForInference(str(tmp_path / "out"))
    saves: list[str] = []

    class Count(FSDPBF16Strategy):
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            saves.append(str(filepath))
            super().save_checkpoint(checkpoint, filepath, storage_options)

    fit(export, saver, strategy=Count(), enable_checkpointing=True)
    assert len(saves) == 2, "one for each step and none for the export"
    assert export.report is not None
    assert export.report.max_logit_gap == 0


class Policy(torch.nn.Module):
    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm, self.value = lm, torch.nn.Linear(64, 1)

    def forward(self, batch: Any) -> Any:
        out = self.lm(**batch, output_hidden_states=True)
        return out.loss + self.value(out.hidden_states[-1]).mean()


@ranks(2)
def test_a_value_head_around_the_model(tmp_path: Path) -> None:
    class Wrapped(UserModule):
        """The model inside a module of its own, so that FSDP's outermost group is not the model's."""

        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                self.policy = Policy(self.model)
                del self.model
                self.model = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.policy(batch)

    export = ExportForInference(str(tmp_path / "out"))
    fit(export, module=Wrapped(), strategy=FSDPBF16Strategy())
    assert export.report is not None
    assert export.report.max_logit_gap == 0


def _spoil(monkeypatch: Any, target: Any, name: str) -> None:
    """Make the written weights differ by a little."""
    original = getattr(target, name)

    def wrong(checkpoint: Any, folder: Path, **kwargs: Any) -> Any:
        from safetensors.torch import load_file, save_file

        result = original(checkpoint, folder, **kwargs)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] *= 1.01
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return result

    monkeypatch.setattr(target, name, wrong)


def test_a_wrong_export_is_an_error_on_every_rank_and_the_weights_stay(tmp_path: Path) -> None:
    _fit_with_a_wrong_export(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out-step-2-")
    with reload_here():
        assert export_checkpoint(left, tmp_path / "out").max_logit_gap == 0


@ranks(2)
def _fit_with_a_wrong_export(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _spoil(patch, export_callback, "merge_checkpoint")
        with pytest.raises(ExportError, match=r"rank 0.*logits differ from the trained model's.*out-step-2-"):
            fit(ExportForInference(str(tmp_path / "out")), strategy=FSDPBF16Strategy("32-true"))
    if rank() == 0:
        with pytest.raises(ConfigurationError, match="2 processes"):
            export_checkpoint(tmp_path / "c.ckpt", tmp_path / "out")


def test_a_wrong_export_of_a_single_device_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    _spoil(monkeypatch, export_callback, "write_whole")
    with pytest.raises(ExportError, match="logits differ"):
        fit(ExportForInference(str(tmp_path / "out"), dtype=None))
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_an_occupied_folder_is_refused_before_training(tmp_path: Path) -> None:
    if rank() == 0:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/precious").write_text("x")
    for callback in (ExportForInference(str(tmp_path / "out")), MergeShardedCheckpoint(str(tmp_path / "out"))):
        module = UserModule()
        with pytest.raises(ExportError, match="something is here already"):
            fit(
                callback,
                ModelCheckpoint(str(tmp_path / "c")),
                module=module,
                strategy=FSDPBF16Strategy(),
                enable_checkpointing=True,
            )
        assert module.losses == []


@pytest.mark.parametrize("kind", [ExportForInference, MergeShardedCheckpoint])
@ranks(2)
def test_a_folder_in_a_checkpoint_is_refused_before_training(kind: Any, tmp_path: Path) -> None:
    saver, module = ModelCheckpoint(str(tmp_path / "runs")), UserModule()
    export = kind(str(tmp_path / "runs/step-2.ckpt/out"), overwrite=True)
    with pytest.raises(ExportError, match="lies in the checkpoint"):
        fit(export, saver, module=module, strategy=FSDPBF16Strategy(), enable_checkpointing=True)
    assert module.losses == []
    assert not (tmp_path / "runs/step-2.ckpt").exists()


@ranks(2, deadline=60)
def test_the_same_script_runs_again_and_replaces_what_it_made(tmp_path: Path) -> None:
    def again(steps: int) -> FinalWeights:
        final = FinalWeights()
        export = ExportForInference(str(tmp_path / "out"), dtype=None, overwrite=True)
        merge = MergeShardedCheckpoint(str(tmp_path / "merged"), overwrite=True)
        saver = ShardedCheckpoint(str(tmp_path / "runs"))
        trainer = quiet_trainer(
            callbacks=[export, merge, final, saver],
            max_steps=steps,
            strategy=FSDPBF16Strategy(),
            enable_checkpointing=True,
        )
        with reload_here():
            trainer.fit(UserModule(), loader(Tokens(16), batch_size=4, rank=rank(), world_size=2), ckpt_path="newest")
        return final

    again(1)
    final = again(2)
    # Finished already: nothing is trained, the export stays as it is, and the merge is made again.
    again(2)
    if rank() == 0:
        for name in ("out", "merged"):
            assert_folder_is(tmp_path / name, final.weights, torch.float32)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "out", "runs"]


def test_a_wrong_export_does_not_replace_an_earlier_one(tmp_path: Path, monkeypatch: Any) -> None:
    fit(ExportForInference(str(tmp_path / "out"), dtype=None))
    earlier = (tmp_path / "out/model.safetensors").read_bytes()
    _spoil(monkeypatch, export_callback, "write_whole")
    with pytest.raises(ExportError, match="logits differ"):
        fit(ExportForInference(str(tmp_path / "out"), dtype=None, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == earlier


@pytest.mark.parametrize("kind", [ExportForInference, MergeShardedCheckpoint])
@ranks(2)
def test_the_model_that_a_fit_starts_from_is_not_replaced(kind: Any, tmp_path: Path) -> None:
    from tests.harness.models import save_tiny_model

    if rank() == 0:
        save_tiny_model(tmp_path / "base")
    dist.barrier()
    module, saver = UserModule(folder=str(tmp_path / "base")), ModelCheckpoint(str(tmp_path / "runs"))
    export = kind(str(tmp_path / "base"), overwrite=True)
    with pytest.raises(ExportError, match="loaded from here"):
        fit(export, saver, module=module, strategy=FSDPBF16Strategy(), enable_checkpointing=True)
    assert module.losses == []


class TwoModels(UserModule):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            from tests.harness.models import tiny_model

            self.teacher = tiny_model("llama")


class NoModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["input_ids"].float()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.mark.parametrize("module", [TwoModels, NoModel])
def test_modules_without_exactly_one_model_are_refused_before_training(module: Any, tmp_path: Path) -> None:
    made = module()
    with pytest.raises(ConfigurationError, match="exactly one Hugging Face model"):
        fit(ExportForInference(str(tmp_path / "out")), module=made)
    assert made.losses == []


def test_an_adapter_is_asked_of_a_model_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no adapter"):
        fit(ExportForInference(str(tmp_path / "out"), format="adapter"))


@ranks(2)
def test_an_unsuitable_strategy_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    with pytest.raises(ConfigurationError, match="ModelParallelStrategy leaves no rank with the whole model"):
        fit(ExportForInference(str(tmp_path / "out")), strategy=ModelParallelStrategy())


def test_nothing_is_exported_in_a_trial_or_after_an_error(tmp_path: Path) -> None:
    fit(ExportForInference(str(tmp_path / "out")), fast_dev_run=True)

    class Fails(UserModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(ExportForInference(str(tmp_path / "out")), module=Fails())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@ranks(2, deadline=120)
def test_with_a_real_fresh_process(tmp_path: Path) -> None:
    export = ExportForInference(str(tmp_path / "out"))
    trainer = quiet_trainer(callbacks=[export], max_steps=2, strategy=FSDPBF16Strategy())
    trainer.fit(UserModule("qwen3"), loader(Tokens(16), batch_size=4, rank=rank(), world_size=2))
    assert export.report is not None
    assert export.report.max_logit_gap == 0


@pytest.mark.parametrize("kind", [ShardedCheckpoint, ModelCheckpoint])
@ranks(2)
def test_the_last_checkpoint_is_merged(kind: Any, tmp_path: Path) -> None:
    saver, final = kind(dirpath=str(tmp_path / "runs"), every_n_train_steps=1), FinalWeights()
    fit(
        MergeShardedCheckpoint(str(tmp_path / "out")),
        final,
        saver,
        strategy=FSDPBF16Strategy(),
        enable_checkpointing=True,
    )
    if rank() == 0:
        assert_folder_is(tmp_path / "out", final.weights, torch.float32)


@ranks(2)
def test_a_merge_goes_next_to_its_checkpoint_by_default(tmp_path: Path) -> None:
    saver, final = ShardedCheckpoint(str(tmp_path / "runs")), FinalWeights()
    merge = MergeShardedCheckpoint(dtype="bfloat16", max_shard_size="100KB")
    fit(merge, final, saver, strategy=FSDPBF16Strategy(), enable_checkpointing=True)
    if rank() == 0:
        folder = tmp_path / "runs/step-2-merged"
        assert_folder_is(folder, final.weights, torch.bfloat16)
        assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@ranks(2)
def test_the_best_checkpoint_is_merged(tmp_path: Path) -> None:
    class Worse(UserModule):
        """Logs a value that is best at the first step."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("score", float(self.global_step), sync_dist=True)
            return self.model(**batch).loss

    saver = ModelCheckpoint(str(tmp_path / "runs"), monitor="score", mode="min", every_n_train_steps=1, save_top_k=2)
    merge = MergeShardedCheckpoint(str(tmp_path / "out"), which="best")
    fit(merge, saver, module=Worse(), steps=3, strategy=FSDPBF16Strategy(), enable_checkpointing=True)
    if rank() == 0:
        from lightning_swift.checkpoint.layout import read_manifest
        from lightning_swift.checkpoint.merge import merge_checkpoint

        best = Path(saver.best_model_path)
        assert read_manifest(best).global_step == 1
        merge_checkpoint(best, tmp_path / "again")
        written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
        assert written[0] == written[1]


@ranks(2)
def test_a_module_without_a_hugging_face_model_is_merged_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saver = ShardedCheckpoint(str(tmp_path / "runs"))
    merge = MergeShardedCheckpoint(str(tmp_path / "out"))
    fit(merge, saver, module=NoModel(), strategy=FSDPBF16Strategy(), enable_checkpointing=True)
    if rank() == 0:
        assert set(load_file(tmp_path / "out/model.safetensors")) == {
            f"layers.{i}.{part}" for i in range(2) for part in ("weight", "bias")
        }


@ranks(2)
def test_a_failed_merge_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "disk on fire")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_callback, "merge_checkpoint", fails)
        saver = ShardedCheckpoint(str(tmp_path / "runs"))
        merge = MergeShardedCheckpoint(str(tmp_path / "out"))
        with pytest.raises(CheckpointError, match=r"merging the checkpoint failed on rank 0.*disk on fire"):
            fit(merge, saver, strategy=FSDPBF16Strategy(), enable_checkpointing=True)
    assert not (tmp_path / "out").exists()


def test_merging_without_checkpoints_is_refused_before_training() -> None:
    with pytest.raises(ConfigurationError, match="no checkpoint to merge"):
        fit(MergeShardedCheckpoint())


def test_waiting_ranks_wait_longer_than_the_process_groups_timeout() -> None:
    _wait_out()


@ranks(2)
def _wait_out() -> None:
    import time
    from datetime import timedelta

    from lightning_swift.checkpoint.together import Together

    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(
        timedelta(seconds=0.5)
    )
    with patient_ranks() as all_ranks, Together(all_ranks, "sleeping", Path()) as step:
        if rank() == 0:
            time.sleep(1.5)
            step.value = "rested"
    assert step.values == ["rested", None]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ExportForInference("out", dtype="int8"),  # type: ignore[arg-type]
        lambda: ExportForInference("out", format="gguf"),  # type: ignore[arg-type]
        lambda: MergeShardedCheckpoint(which="first"),  # type: ignore[arg-type]
        lambda: MergeShardedCheckpoint(dtype="int8"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_at_construction(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        wrong()


@pytest.mark.parametrize(
    ("name", "options"),
    [("ExportForInference", "output: out, dtype: null, format: adapter"), ("MergeShardedCheckpoint", "which: best")],
)
def test_they_can_be_written_in_yaml(name: str, options: str) -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(L.Callback, "callback")
    config = parser.parse_string(
        f"callback: {{class_path: lightning_swift.callbacks.{name}, init_args: {{{options}}}}}"
    )
    assert type(parser.instantiate(config).callback).__name__ == name
