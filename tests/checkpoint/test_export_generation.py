"""A quick look at an exported folder: greedy by default, chat template applied, errors that say what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.generation import generate
from tests.harness.models import tiny_model
from tests.harness.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generation") / "model"
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab=len(tokenizer))
    # A folder's own settings for drawing must neither be used nor warned of.
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9, eos_token_id=None, pad_token_id=None)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def greedy(folder: Path, ids: list[int], n: int) -> str:
    """The likeliest token each time, without generate()."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for _ in range(n):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return str(AutoTokenizer.from_pretrained(folder).decode(ids[-n:], skip_special_tokens=True)).strip()


def test_greedy_with_the_chat_template(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello world"}], add_generation_prompt=True, tokenize=False
    )
    expected = greedy(folder, tokenizer(text, add_special_tokens=False)["input_ids"], 8)
    assert generate(folder, "hello world", 8) == expected


def test_plain_continuation(folder: Path) -> None:
    ids = tiny_tokenizer()("hello world")["input_ids"]
    assert generate(folder, "hello world", 8, chat=False) == greedy(folder, ids, 8)


def test_drawing_depends_on_the_seed_alone(folder: Path) -> None:
    state = torch.get_rng_state()
    texts = [generate(folder, "hello", 16, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_prompt_is_not_repeated(folder: Path) -> None:
    assert "hello world" not in generate(folder, "hello world", 4)


def test_missing_parts_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json.*merge"):
        generate(tmp_path, "hello")
    with pytest.raises(ModelError, match="no config"):
        generate(tmp_path / "nowhere", "hello")
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer cannot be loaded.*Copy the tokenizer files"):
        generate(tmp_path, "hello")
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        generate(tmp_path, "hello")


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: ...\n")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}}'
    )
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.C", null]}}')
    with pytest.raises(ModelError):
        generate(tmp_path, "hello")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("wrong", [{"prompt": ""}, {"max_new_tokens": 0}, {"temperature": -1.0}], ids=str)
def test_wrong_arguments(wrong: Any, folder: Path) -> None:
    with pytest.raises(ModelError):
        generate(**{"folder": folder, "prompt": "hello", **wrong})


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99", "xpu"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"no device {device!r}.*Choose one of cpu"):
        generate(tmp_path / "nowhere", "hello", device=device)
