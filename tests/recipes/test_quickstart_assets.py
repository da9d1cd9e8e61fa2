"""The quickstart's text: no repeats, no held-out question among the training ones, nothing half-written."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import yaml

from recipes.quickstart import assets
from recipes.quickstart.__main__ import last_value


@pytest.fixture
def downloads(tmp_path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    pairs = [[f"Question {i % 400}?", f"Answer {i % 500}."] for i in range(1000)]
    odd = [["three", "turns", "here"], ["empty", " "], ["number", 1963]]
    with zipfile.ZipFile(folder / "chatterbot_corpus-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("chatterbot_corpus/data/english/a.yml", yaml.safe_dump({"conversations": pairs + odd}))
        wheel.writestr("chatterbot_corpus/data/german/a.yml", yaml.safe_dump({"conversations": [["Frage", "Antwort"]]}))
    return folder


def read(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert all([message["role"] for message in row] == ["user", "assistant"] for row in rows)
    return [(row[0]["content"], row[1]["content"]) for row in rows]


def test_pairs_are_kept_once_and_split_by_question(downloads, tmp_path):
    counts = assets.prepare_text(tmp_path / "text", downloads=downloads)
    train, held_out = read(tmp_path / "text" / "train.jsonl"), read(tmp_path / "text" / "heldout.jsonl")
    assert counts == (len(train), len(held_out))
    every = train + held_out
    assert len(every) == len(set(every)) == len({(i % 400, i % 500) for i in range(1000)})
    assert {question for question, _ in train}.isdisjoint({question for question, _ in held_out})
    # One in eight; 400 questions make the share of a hash vary by a few percent.
    assert 0.08 < len({q for q, _ in held_out}) / 400 < 0.18


def test_what_is_there_is_not_made_again(downloads, tmp_path):
    first = assets.prepare_text(tmp_path / "text", downloads=downloads)
    assert assets.prepare_text(tmp_path / "text", downloads=tmp_path / "nothing here") == first
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assets.prepare_model(tmp_path / "model", downloads=tmp_path / "nothing here")


def test_downloads_are_pinned_to_the_byte():
    lines = [line for line in assets._REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    assert all("==" in line and "--hash=sha256:" in line for line in lines)


def test_the_last_value_of_a_metric_is_found(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,val_loss,train_loss\n0,2.5,\n1,,3\n2,1.5,\n3,,1\n")
    assert last_value(tmp_path / "metrics.csv", "val_loss") == 1.5
