"""CausalLM in one process: where its model comes from, what it refuses, its optimizer, its logs, its predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_swift.errors import ConfigurationError, DataError, ModelError
from lightning_swift.models.causal_lm import CausalLM
from tests.harness.models import VOCAB, Tokens, quiet_trainer, save_tiny_model, tiny_config

# Most fits here need no validation.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
X = torch.arange(3, 35)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", layers=1)


def save_tokenizer(folder: Path, tokens: int) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(tokens)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(folder)


def built(*args: Any, **kwargs: Any) -> CausalLM:
    module = CausalLM(*args, **kwargs)
    module.configure_model()
    return module


def logits(module: CausalLM) -> Tensor:
    with torch.no_grad():
        result: Tensor = module.model(X).logits
    return result


# --- where the model comes from


def test_a_folder_gives_its_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module = CausalLM(str(folder))
    assert module.model is None
    module.configure_model()
    assert torch.equal(logits(module), expected(X).logits)
    assert all(m.training for m in module.model.modules())
    first = module.model
    module.configure_model()
    assert module.model is first


def test_a_configuration_gives_random_weights_that_depend_on_the_seed_only(tmp_path: Path) -> None:
    config = tiny_config(layers=1)
    config.save_pretrained(tmp_path)
    config.to_json_file(tmp_path / "small.json")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ways: list[Any] = [config, config.to_dict(), str(tmp_path / "config.json"), tmp_path / "small.json"]
    results = [logits(built(way)) for way in ways]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(results[0], other) for other in results)
    assert not torch.equal(results[0], logits(built(config, seed=1)))


def test_a_folder_without_weights_is_trained_from_scratch_and_says_so(tmp_path: Path) -> None:
    tiny_config(layers=1).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="holds no weights"):
        module = built(str(tmp_path))
    assert not any(p.is_meta for p in module.model.parameters())


def test_overrides_reach_the_configuration(folder: Path) -> None:
    changes = {"attn_implementation": "eager", "rms_norm_eps": 0.5}
    for given in (str(folder), tiny_config(layers=1), tiny_config(layers=1).to_dict()):
        config = built(given, config_overrides=changes).model.config
        assert config._attn_implementation == "eager"
        assert config.rms_norm_eps == 0.5


def test_hyperparameters_are_plain_data(folder: Path) -> None:
    for given in (folder, tiny_config(layers=1)):
        module = CausalLM(given, lr=1e-3, freeze=["model.embed_tokens.*"])
        plain = json.loads(json.dumps(dict(module.hparams)))
        assert plain["lr"] == 1e-3
        again = CausalLM(**plain)
        again.configure_model()
        module.configure_model()
        assert torch.equal(logits(again), logits(module))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, ConfigurationError, "built from a int"),
        ({"model_type": "mine"}, ModelError, "no model type 'mine'"),
        ({}, ModelError, "no model type None"),
        ("/nowhere/model", ModelError, "not a folder"),
    ],
)
def test_what_is_no_model_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CausalLM(given)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"weight_decay": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
        {"warmup": 1.5},
        {"warmup": -1},
        {"scheduler": "step"},
        {"loss_reduction": "sum"},
        {"loss": "whole"},
        {"loss_chunk": 0},
        {"optimizer": "adam"},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_values_that_are_not_allowed_are_refused_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        CausalLM(tiny_config(layers=1), **options)


# --- tokenizer


def test_the_tokenizer_is_there_after_construction(folder: Path, tmp_path: Path) -> None:
    assert CausalLM(folder).tokenizer is None
    save_tokenizer(folder, VOCAB)
    assert len(CausalLM(folder).tokenizer) == VOCAB
    elsewhere = tmp_path / "tokenizer"
    save_tokenizer(elsewhere, 20)
    assert len(CausalLM(tiny_config(layers=1), tokenizer=str(elsewhere)).tokenizer) == 20
    with pytest.raises(ModelError, match="no tokenizer"):
        CausalLM(tiny_config(layers=1), tokenizer=str(tmp_path))


def test_a_tokenizer_beyond_the_embedding_is_refused(folder: Path) -> None:
    save_tokenizer(folder, VOCAB + 1)
    with pytest.raises(ModelError, match=f"{VOCAB + 1} tokens and the model's embedding {VOCAB} rows"):
        CausalLM(folder)


# --- training


def train(module: CausalLM, *, steps: int = 4, **trainer: Any) -> CausalLM:
    quiet_trainer(max_steps=steps, log_every_n_steps=1, **trainer).fit(module, DataLoader(Tokens(8), batch_size=2))
    return module


def test_it_learns(folder: Path) -> None:
    module = CausalLM(folder, lr=1e-2)
    data = DataLoader(Tokens(4), batch_size=4)
    trainer = quiet_trainer(max_steps=20)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data, data)
    after = trainer.validate(module, data, verbose=False)[0]
    assert before["val_loss"] == pytest.approx(torch.log(torch.tensor(VOCAB)).item(), abs=0.2)
    assert after["val_loss"] < before["val_loss"] / 2
    assert trainer.callback_metrics["val_loss"] == pytest.approx(after["val_loss"])


def test_matrices_decay_and_vectors_do_not() -> None:
    module = built(tiny_config("gpt2", layers=1), weight_decay=0.1)
    module = train(module, steps=1)
    decayed, others = module.trainer.optimizers[0].param_groups
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("scheduler", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 2, [0, 0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", 0.25, [0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", 0, [0.5 * (1 + torch.tensor(torch.pi * i / 8).cos().item()) for i in range(8)]),
    ],
)
def test_the_learning_rate_follows_its_schedule(scheduler: Any, warmup: float, expected: list[float]) -> None:
    class Recorder(CausalLM):
        def on_train_batch_start(self, *_: Any) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    rates: list[float] = []
    train(Recorder(tiny_config(layers=1), lr=1e-3, scheduler=scheduler, warmup=warmup), steps=8)
    assert rates == pytest.approx([1e-3 * e for e in expected])


def test_steps_are_counted_with_accumulation() -> None:
    module = CausalLM(tiny_config(layers=1), scheduler="linear")
    quiet_trainer(max_epochs=2, accumulate_grad_batches=3).fit(module, DataLoader(Tokens(8), batch_size=2))
    # 4 batches in windows of 3 and 1, twice; the schedule reaches 0 with the last step.
    assert module.trainer.global_step == 4
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.0


class Endless(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        while True:
            yield {"input_ids": X[0], "labels": X[0]}


@pytest.mark.parametrize("options", [{"scheduler": "linear"}, {"scheduler": "constant", "warmup": 0.1}], ids=str)
def test_a_schedule_with_an_end_needs_one(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="training has no end"):
        quiet_trainer(max_epochs=1).fit(CausalLM(tiny_config(layers=1), **options), DataLoader(Endless(), batch_size=2))


def test_frozen_parameters_stay(folder: Path) -> None:
    module = built(folder, lr=0.1, freeze=["model.embed_tokens.*", "*.mlp.*"])
    before = {n: p.clone() for n, p in module.named_parameters()}
    train(module, steps=1)
    for name, value in module.named_parameters():
        frozen = "embed_tokens" in name or ".mlp." in name
        assert value.requires_grad != frozen
        assert torch.equal(before[name], value) == frozen, name
    with pytest.raises(ConfigurationError, match=r"'model\.embedding"):
        built(folder, freeze=["model.embedding*"])
    everything = built(folder, freeze=["*"])
    with pytest.raises(ConfigurationError, match="no parameter is trainable"):
        train(everything)


# --- batches


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, *rows: dict[str, Tensor]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": X[0]}, "no labels"),
        ({"input_ids": X[0, :1], "labels": X[0, :1]}, "no token to predict"),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused(row: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        quiet_trainer(max_steps=1).fit(CausalLM(tiny_config(layers=1)), DataLoader(Rows(row)))


@pytest.mark.parametrize("reduction", ["token", "mean"])
def test_a_batch_without_targets_adds_nothing(reduction: Any) -> None:
    class Recorder(CausalLM):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})

    gradients: list[dict[str, Tensor]] = []
    losses: list[float] = []
    full = {"input_ids": X[0], "labels": X[0]}
    empty = {"input_ids": X[0].flip(0), "labels": torch.full_like(X[0], -100)}
    for rows in ([full], [full, empty]):
        module = Recorder(tiny_config(layers=1), loss_reduction=reduction)
        trainer = quiet_trainer(max_steps=1, accumulate_grad_batches=len(rows), log_every_n_steps=1)
        trainer.fit(module, DataLoader(Rows(*rows)))
        losses.append(trainer.logged_metrics["train_loss"].item())
    # The mean of means counts the empty batch as a mean of 0; the mean over tokens does not count it.
    share = 1.0 if reduction == "token" else 0.5
    assert losses[1] == pytest.approx(losses[0] if reduction == "token" else 0.0)
    for name, alone in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], share * alone)


def test_prompts_of_different_lengths_are_continued_like_single_ones(folder: Path) -> None:
    module = CausalLM(folder, max_new_tokens=5)
    short = {"input_ids": torch.tensor([5, 6, 7, 0, 0]), "attention_mask": torch.tensor([1, 1, 1, 0, 0])}
    long = {"input_ids": torch.tensor([8, 9, 10, 11, 12]), "attention_mask": torch.ones(5, dtype=torch.long)}
    trainer = quiet_trainer()
    (together,) = trainer.predict(module, DataLoader(Rows(short, long), batch_size=2))
    (alone,) = trainer.predict(module, DataLoader(Rows({"input_ids": torch.tensor([5, 6, 7])})))
    assert together.shape == (2, 10)
    assert together[0, 2:].tolist() == alone[0].tolist()
    assert together[1, :5].tolist() == [8, 9, 10, 11, 12]


def test_no_cache_is_kept_in_training(folder: Path) -> None:
    module = built(folder)
    seen = []
    module.model.register_forward_hook(lambda m, a, out: seen.append(out.past_key_values))
    train(module, steps=1)
    assert seen == [None]
    assert module.model.config.use_cache


def test_it_is_configured_from_yaml(folder: Path) -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(CausalLM, "model")
    text = f"class_path: lightning_swift.CausalLM\ninit_args: {{path_or_config: {folder}, lr: 2e-5, warmup: %s}}"
    for warmup, kind in (("100", int), ("0.03", float)):
        values = parser.parse_string("model:\n  " + (text % warmup).replace("\n", "\n  "))
        module = parser.instantiate(values).model
        assert module.hparams["lr"] == 2e-5
        assert type(module.hparams["warmup"]) is kind
    given = {"class_path": "lightning_swift.CausalLM", "init_args": {"path_or_config": tiny_config().to_dict()}}
    module = parser.instantiate(parser.parse_object({"model": given})).model
    module.configure_model()
    with pytest.raises(SystemExit):
        parser.parse_string("model:\n  " + (text % "1, learning_rate: 3").replace("\n", "\n  "))
