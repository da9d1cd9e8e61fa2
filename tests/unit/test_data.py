"""Sources, policies and errors of ``ChatDataModule``; every message names the place and the cure."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_swift.data import limits
from lightning_swift.data.chat import ChatDataModule
from lightning_swift.errors import ConfigurationError, DataError
from tests.harness.models import tiny_config
from tests.harness.tokenizers import CHATML, tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
PAIR = {"prompt": "The capital of France is", "completion": " Paris."}
TEXT = {"text": "hello world"}


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def module(path: Path, **options: Any) -> ChatDataModule:
    settings = {"tokenizer": tiny_tokenizer(), "max_length": 64, "batch_size": 1, "num_workers": 0, **options}
    return ChatDataModule(str(path), cache_dir=str(path.parent / "cache"), **settings)


def ready(path: Path, **options: Any) -> ChatDataModule:
    data = module(path, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def error_of(path: Path, **options: Any) -> str:
    data = module(path, **options)
    data.prepare_data()  # never raises for bad data: one rank alone would leave the others waiting
    with pytest.raises(DataError) as error:
        data.setup("fit")
    return str(error.value).replace(str(path.parent), "DIR")


def decoded(data: ChatDataModule) -> list[str]:
    return [data.tokenizer.decode(batch["input_ids"][0]) for batch in data.train_dataloader()]


def test_the_three_forms_from_the_three_kinds_of_source(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [CHAT, PAIR, TEXT]
    files = [jsonl(tmp_path / "data.jsonl", *rows), tmp_path / "data.parquet", tmp_path / "folder", tmp_path / "splits"]
    # Arrow knows one type per column: absent fields become nulls.
    table = Dataset.from_list([{**dict.fromkeys(("messages", "prompt", "completion", "text")), **row} for row in rows])
    table.to_parquet(str(files[1]))
    table.save_to_disk(str(files[2]))
    DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(files[3]))
    expected = [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n",
        "The capital of France is Paris.<|im_end|>",
        "hello world<|im_end|>",
    ]
    for file in files:
        assert decoded(ready(file, shuffle=False)) == expected, file.name


FORMS = 'A record has "messages", or "prompt" and "completion", or "text".'
WHOLE = "Each line must be one whole JSON object."
HALF = "half of a surrogate pair, which is no character. Write the whole character, or remove it."
BAD_LINES = [
    ('{"text": "a"', f"This line is not JSON (Expecting ',' delimiter at column 13). {WHOLE}"),
    ("[1]", f"This record is a list, not an object. {FORMS}"),
    ({}, f"This record has no fields. {FORMS}"),
    ({"txt": "a"}, f'This record has the fields "txt". {FORMS}'),
    ({"prompt": "a"}, f'This record has the fields "prompt". {FORMS} "completion" is missing.'),
    ({"text": "a", "prompt": "b"}, f'This record has the fields "prompt", "text". {FORMS} This one mixes them.'),
    (
        {"text": "a", "id": "b"},
        """This record has the fields "id", "text". Name unused fields: ignore_columns=['id'].""",
    ),
    ({"text": 3}, '"text" is a int, not a string. Make it a string.'),
    ({"prompt": [], "completion": "a"}, '"prompt" is a list, not a string. Give conversations as messages.'),
    ({"text": None}, f'This record has nothing but null in "text". {FORMS}'),
    ({"text": None, "messages": None}, f'This record has nothing but null in "messages", "text". {FORMS}'),
    ({"prompt": "a", "completion": None}, f'This record has the fields "prompt". {FORMS} "completion" is null.'),
    ('{"text": "\\ud800 x"}', f"\"text\" has '\\ud800', {HALF}"),
    ('{"prompt": "a", "completion": "x \\udc00"}', f"\"completion\" has '\\udc00', {HALF}"),
    ('{"messages": [{"role": "user", "content": "\\udbff"}]}', f"message 0: \"content\" has '\\udbff', {HALF}"),
    (
        '{"messages": [{"role": "assistant", "tool_calls": [{"a": {"\\ud800": 1}}]}]}',
        f"message 0: \"tool_calls\" has '\\ud800', {HALF}",
    ),
    ({"messages": 3}, f'"messages" is a int, not a list. {FORMS}'),
    ({"messages": []}, f'"messages" is not a list with at least one message. {FORMS}'),
    ({"messages": ["hi"]}, 'message 0: A str, not an object. It needs "role" and "content".'),
    ({"messages": [{"content": "a"}]}, 'message 0: "role" is missing or not a string. Such as "user" or "assistant".'),
    ({"messages": [{"role": "user"}]}, 'message 0: "content" is missing or not a string. Only text is supported.'),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    separator = ", " if message.startswith("message ") else ": "
    assert error_of(jsonl(tmp_path / "data.jsonl", TEXT, line)) == f"DIR/data.jsonl:2{separator}{message}"


def test_a_line_of_other_bytes_is_named_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a b"}\n\n{"text": "\xff"}\n')
    assert error_of(path) == "DIR/data.jsonl:3: This line is not UTF-8 (invalid start byte). Save as UTF-8."


def test_deep_nesting_is_refused_and_not_a_crash(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert error_of(path).startswith("DIR/data.jsonl:1: This line is nested too deeply.")


def test_rows_of_parquet_and_folders_are_named(tmp_path: Path) -> None:
    from datasets import Dataset

    table = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", None]})
    table.to_parquet(str(tmp_path / "data.parquet"))
    table.save_to_disk(str(tmp_path / "folder"))
    assert error_of(tmp_path / "data.parquet").startswith(
        'DIR/data.parquet: row 1: This record has the fields "prompt".'
    )
    assert error_of(tmp_path / "folder").startswith('DIR/folder: row 1: This record has the fields "prompt".')


def test_sources_that_are_none(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    assert error_of(tmp_path / "no.jsonl") == "DIR/no.jsonl: This file or folder does not exist. Check the path."
    (tmp_path / "data.csv").write_text("text\na\n")
    assert error_of(tmp_path / "data.csv").startswith(
        'DIR/data.csv: Files of type ".csv" are not read. Give JSON Lines'
    )
    (tmp_path / "data.parquet").write_text("text\na\n")
    assert error_of(tmp_path / "data.parquet").startswith("DIR/data.parquet: This is not a whole parquet file (")
    (tmp_path / "empty").mkdir()
    assert error_of(tmp_path / "empty").startswith("DIR/empty: This folder cannot be read as a data set (")
    DatasetDict({"test": Dataset.from_list([TEXT])}).save_to_disk(str(tmp_path / "splits"))
    message = error_of(tmp_path / "splits")
    assert message.startswith("DIR/splits: This folder has the splits ['test'] and no \"train\".")
    assert message.endswith("Name one of them, for example DIR/splits/test.")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    assert error_of(tmp_path / "data.jsonl") == (
        "DIR/data.jsonl: There is no record in it. Give a file or folder with records."
    )


def test_whole_surrogate_pairs_and_halves_in_ignored_fields_are_fine(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", '{"text": "a \\ud83d\\ude00", "id": "\\ud800"}')
    assert len(decoded(ready(path, ignore_columns=["id"]))) == 1


def test_columns_may_be_ignored_by_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", {**TEXT, "source": "x", "id": 3})
    assert decoded(ready(path, ignore_columns=["source", "id"])) == ["hello world<|im_end|>"]


def lengths(data: ChatDataModule) -> list[int]:
    return sorted(len(batch["input_ids"][0]) for batch in data.train_dataloader())


def test_max_length_policies_at_the_border(tmp_path: Path) -> None:
    texts = ["a" * n for n in (9, 10, 11)]
    path = jsonl(tmp_path / "data.jsonl", *({"text": text} for text in texts))
    size = [len(tiny_tokenizer()(text)["input_ids"]) + 1 for text in texts]
    assert size == [10, 11, 12]
    assert lengths(ready(path, max_length=12)) == size
    assert error_of(path, max_length=11) == (
        "DIR/data.jsonl:3: This record has 12 tokens and max_length is 11. "
        'Raise max_length, or set too_long="drop" or too_long="truncate".'
    )
    dropped = ready(path, max_length=11, too_long="drop")
    assert lengths(dropped) == [10, 11]
    assert (dropped.statistics["train"].dropped, dropped.statistics["train"].kept) == (1, 2)
    cut = ready(path, max_length=11, too_long="truncate")
    assert lengths(cut) == [10, 11, 11]
    assert (cut.statistics["train"].truncated, cut.statistics["train"].longest) == (1, 12)


def test_truncation_that_cuts_all_targets_is_counted_as_masked(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "one " * 40}, CHAT["messages"][1]]}
    path = jsonl(tmp_path / "data.jsonl", long, CHAT, CHAT)
    data = ready(path, too_long="truncate", max_length=30, max_masked=0.5)
    assert (data.statistics["train"].truncated, data.statistics["train"].masked) == (1, 1)
    assert all((batch["labels"] >= 0).any() for batch in data.train_dataloader())
    assert error_of(path, too_long="truncate", max_length=30) == (
        "DIR/data.jsonl: 1 of 3 records have no target token, 33%; max_masked allows 10%. "
        'Are there "assistant" messages, and does max_length leave room for the answers? '
        'loss_on="all" counts every token; max_masked accepts more such records.'
    )


def test_data_without_any_target_or_record_is_refused(tmp_path: Path) -> None:
    question = {"messages": CHAT["messages"][:1]}
    path = jsonl(tmp_path / "data.jsonl", question, question)
    assert "2 of 2 records have no target token, 100%" in error_of(path, max_masked=0.99)
    assert ready(path, loss_on="all").statistics["train"].kept == 2
    path = jsonl(tmp_path / "long.jsonl", {"text": "a" * 100})
    assert error_of(path, too_long="drop") == (
        "DIR/long.jsonl: No record is left: 0 of 1 records, 0 tokens, 0 of them targets, 1 too long and dropped. "
        "The longest has 101 tokens. Raise max_length (now 64)."
    )


def test_what_was_read_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = jsonl(tmp_path / "data.jsonl", CHAT, TEXT, {"text": "a" * 100})
    # Lightning's logger does not propagate where it has a handler of its own.
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(caplog.handler)
    try:
        data = module(path, too_long="truncate")
        with caplog.at_level(logging.INFO, logger=logger.name):
            data.setup("fit")
            data.setup("fit")
    finally:
        logger.removeHandler(caplog.handler)
    reports = {record.getMessage() for record in caplog.records if "records" in record.getMessage()}
    assert reports == {f"train data {path}: {data.statistics['train']}"}
    assert str(data.statistics["train"]).startswith("3 of 3 records, ")
    assert str(data.statistics["train"]).endswith("1 truncated")


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("pads_with_end", [False, True])
def test_the_end_token_is_a_target_even_if_it_pads(tmp_path: Path, family: str, pads_with_end: bool) -> None:
    tokenizer = tiny_tokenizer(family)
    if pads_with_end:
        tokenizer.pad_token = tokenizer.eos_token
    assert (tokenizer.pad_token_id is not None) == pads_with_end
    longer = {"messages": [{"role": "user", "content": "one two three"}, CHAT["messages"][1]]}
    data = ready(jsonl(tmp_path / "data.jsonl", CHAT, longer), tokenizer=tokenizer, batch_size=2)
    (batch,) = data.train_dataloader()
    for row in range(2):
        size = int(batch["attention_mask"][row].sum())
        targets = batch["labels"][row][batch["labels"][row] >= 0].tolist()
        assert targets.count(tokenizer.eos_token_id) == 1
        assert (batch["labels"][row, size:] == -100).all()
        assert (batch["input_ids"][row, size:] == tokenizer.eos_token_id).all()
    assert {int(mask.sum()) for mask in batch["attention_mask"]} != {batch["input_ids"].shape[1]}


def test_a_changed_file_tokenizer_or_option_is_tokenised_anew_and_the_same_is_not(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", CHAT)

    def entries() -> int:
        return len(list((tmp_path / "cache").iterdir()))

    ready(path)
    ready(path)
    assert entries() == 1
    ready(path, max_masked=0.5)
    assert entries() == 1
    ready(path, loss_on="all")
    assert entries() == 2
    ready(path, tokenizer=tiny_tokenizer(template=CHATML + " "))
    assert entries() == 3
    jsonl(path, CHAT, TEXT)
    assert len(decoded(ready(path))) == 2
    assert entries() == 4


def test_a_failed_build_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    error_of(jsonl(tmp_path / "data.jsonl", TEXT, "{"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_validation_is_split_off_the_same_way_every_time(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", *({"text": f"a {i}"} for i in range(20)))
    data = ready(path, validation_fraction=0.25)
    validation = [data.tokenizer.decode(batch["input_ids"][0]) for batch in data.val_dataloader()]
    assert len(validation) == 5
    assert len(set(validation) | set(decoded(data))) == 20
    again = module(path, validation_fraction=0.25)
    again.setup("validate")
    assert [again.tokenizer.decode(batch["input_ids"][0]) for batch in again.val_dataloader()] == validation


def test_prediction_gets_prompts_padded_on_the_left(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", CHAT, PAIR)
    data = ChatDataModule(
        predict=str(path), tokenizer=tiny_tokenizer(), num_workers=0, batch_size=2, cache_dir=str(tmp_path / "cache")
    )
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert set(batch) == {"input_ids", "attention_mask"}
    assert (batch["attention_mask"][:, -1] == 1).all()
    prompts = [
        data.tokenizer.decode(ids[mask == 1])
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert prompts == ["<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n", "The capital of France is"]


def test_long_prompts_lose_their_start_and_keep_the_generation_prompt(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "one " * 40}]}
    data = ChatDataModule(
        predict=str(jsonl(tmp_path / "data.jsonl", long)),
        tokenizer=tiny_tokenizer(),
        max_length=20,
        too_long="truncate",
        num_workers=0,
        cache_dir=str(tmp_path / "cache"),
    )
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert batch["input_ids"].shape == (1, 20)
    assert data.tokenizer.decode(batch["input_ids"][0]).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_stages_without_data_are_refused(tmp_path: Path) -> None:
    data = module(jsonl(tmp_path / "data.jsonl", TEXT))
    with pytest.raises(
        ConfigurationError, match=r"ChatDataModule\(test=\.\.\.\): \"test\" needs data and none was given"
    ):
        data.setup("test")
    # Without validation data Lightning must not believe that there is some.
    assert not is_overridden("val_dataloader", data)
    assert is_overridden("val_dataloader", module(tmp_path / "data.jsonl", validation_fraction=0.5))


BAD_ARGUMENTS = [
    ({"max_length": 1}, "max_length"),
    ({"batch_size": 0}, "batch_size"),
    ({"num_workers": -1}, "num_workers"),
    ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
    ({"seed": -1}, "seed"),
    ({"max_masked": 1.0}, "max_masked"),
    ({"loss_on": "user"}, "loss_on"),
    ({"too_long": "ignore"}, "too_long"),
    ({"validation_fraction": 1.0}, "validation_fraction"),
    ({"validation_fraction": 0.1, "validation": "v.jsonl"}, "validation"),
]


@pytest.mark.parametrize(("options", "name"), BAD_ARGUMENTS, ids=[name for _, name in BAD_ARGUMENTS])
def test_arguments_out_of_range_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"ChatDataModule\({name}=\.\.\.\): .* is not allowed\. Use "):
        ChatDataModule("data.jsonl", **options)


def test_tokenizers_come_from_a_folder_and_never_from_a_hub(tmp_path: Path) -> None:
    tiny_tokenizer("llama3").save_pretrained(tmp_path / "tokenizer")
    path = jsonl(tmp_path / "data.jsonl", CHAT)
    assert decoded(ready(path, tokenizer=str(tmp_path / "tokenizer"))) == decoded(
        ready(path, tokenizer=tiny_tokenizer("llama3"))
    )
    with pytest.raises(
        ConfigurationError, match=r"'org/name' is not a folder\. Give the folder of a model or tokenizer"
    ):
        module(path, tokenizer="org/name").setup("fit")
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        module(path, tokenizer=str(tmp_path)).setup("fit")
    with pytest.raises(ConfigurationError, match="No tokenizer was given and the LightningModule has no attribute"):
        module(path, tokenizer=None).setup("fit")


def test_code_in_a_tokenizer_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", None]}
    config["tokenizer_class"] = "Evil"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        module(jsonl(tmp_path / "data.jsonl", TEXT), tokenizer=str(folder)).setup("fit")
    assert not (tmp_path / "marker").exists()


class Owner(L.LightningModule):
    """A LightningModule with a tokenizer and a model whose config is known."""

    def __init__(self, *, vocab: int = 320, tokenizer: Any = None) -> None:
        super().__init__()
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.model = SimpleNamespace(config=tiny_config(vocab=vocab))


def trained_with(owner: Any, path: Path, **options: Any) -> ChatDataModule:
    data = module(path, **options)
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        lightning_module=owner,
        distributed_sampler_kwargs=options.pop("ranks", {"num_replicas": 2, "rank": 0}),
        fit_loop=SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0)))
        ),
    )
    return data


def test_the_tokenizer_of_the_lightning_module_is_the_default(tmp_path: Path) -> None:
    owner = Owner()
    data = trained_with(owner, jsonl(tmp_path / "data.jsonl", CHAT, CHAT), tokenizer=None)
    data.setup("fit")
    assert data.tokenizer is owner.tokenizer


def test_tokens_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", CHAT, CHAT)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|new|>"])
    data = trained_with(Owner(), path, tokenizer=tokenizer)
    with pytest.raises(DataError) as error:
        data.setup("fit")
    assert str(error.value) == (
        "tokenizer: The tokenizer has 1 tokens beyond the model's 320 embedding rows, the first is '<|new|>' with id "
        "320. Use the model's own tokenizer, or resize the embeddings (model.resize_token_embeddings) and save that "
        "model first."
    )
    with pytest.raises(DataError, match=r"f: Token id 320 is beyond the model's 320 embedding rows\."):
        limits.check_token_ids(320, 320, where="f")
    limits.check_token_ids(319, 320, where="f")


def test_records_beyond_the_context_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", CHAT, CHAT)
    with pytest.raises(DataError) as error:
        trained_with(Owner(), path, max_length=513).setup("fit")
    assert str(error.value) == (
        "max_length: max_length=513 is more than the model's context of 512 tokens. Set max_length to 512 or less."
    )
    trained_with(Owner(), path, max_length=512).setup("fit")


def test_fewer_records_than_one_batch_on_every_rank_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", CHAT, CHAT, CHAT)
    with pytest.raises(DataError) as error:
        trained_with(Owner(), path, batch_size=2).setup("fit")
    assert str(error.value).replace(str(tmp_path), "DIR") == (
        "train data DIR/data.jsonl: 3 records are fewer than one batch on every rank: 2 data-parallel ranks x "
        "batch_size 2 = 4. Use a smaller batch_size, fewer ranks, or more records."
    )


def test_arguments_parse_from_yaml(tmp_path: Path) -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ChatDataModule, "data")
    text = "data: {train: a.jsonl, tokenizer: models/x, max_length: 8, ignore_columns: [id], validation_fraction: 0.1}"
    (tmp_path / "config.yaml").write_text(text)
    parsed = parser.parse_path(str(tmp_path / "config.yaml"))
    assert parser.instantiate(parsed).data._options.ignore_columns == ("id",)
