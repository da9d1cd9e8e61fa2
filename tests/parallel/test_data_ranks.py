"""All ranks agree about the data: on errors, on the number of batches, and on who gets which records."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_swift.data.chat import ChatDataModule
from lightning_swift.errors import DataError
from tests.harness.models import quiet_trainer
from tests.harness.ranks import ranks
from tests.harness.tokenizers import tiny_tokenizer
from tests.parallel.test_data_resume import Validating, numbers, write_records


def data_module(folder: Path, **options: Any) -> ChatDataModule:
    settings = {"max_length": 16, "batch_size": 2, "num_workers": 0, "cache_dir": str(folder / "cache"), **options}
    return ChatDataModule(str(folder / "data.jsonl"), **settings)


class Watched(Validating):
    """Notices when it is built, and records what it evaluates and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.built = False
        self.evaluated: list[int] = []

    def configure_model(self) -> None:
        self.built = True

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluated += numbers(batch, self.tokenizer)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.evaluated += numbers(batch, self.tokenizer)
        return batch["input_ids"]


def everyones(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@ranks(2)
def refused(folder: Path, pattern: str, options: dict[str, Any]) -> None:
    module = Watched()
    with pytest.raises(DataError, match=pattern):
        quiet_trainer(strategy="ddp", max_steps=1).fit(module, data_module(folder, **options))
    assert not module.built
    dist.barrier()


@pytest.mark.parametrize(
    ("lines", "options", "pattern"),
    [
        (['{"text": "a"}', '{"text": '], {}, r"data\.jsonl:2: This line is not JSON"),
        ([], {}, "There is no record in it"),
        (['{"text": "a"}'] * 3, {}, "3 records are fewer than one batch on every rank: 2 data-parallel ranks"),
        (['{"text": "one two three"}'] * 4, {"max_length": 2}, r"data\.jsonl:1: This record has \d+ tokens"),
    ],
    ids=["line", "empty", "few", "long"],
)
def test_bad_data_is_refused_on_every_rank_before_the_model_is_built(
    tmp_path: Path, lines: list[str], options: dict[str, Any], pattern: str
) -> None:
    (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    refused(tmp_path, pattern, options)


@ranks(2)
def test_tensor_parallel_peers_draw_the_same_batches(tmp_path_of_all: Path) -> None:
    module = Watched()
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, save_distributed_checkpoint=False)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=True, num_sanity_val_steps=0)
    data = data_module(tmp_path_of_all)
    trainer.fit(module, data)
    mine, other = everyones(module.seen)
    assert mine == other
    assert len(mine) == 11
    assert data.samples_seen == 22


@pytest.fixture
def tmp_path_of_all(tmp_path: Path) -> Path:
    write_records(tmp_path / "data.jsonl")
    return tmp_path


@ranks(2)
def test_evaluation_sees_every_record_and_keeps_ranks_in_step(tmp_path_of_all: Path) -> None:
    (tmp_path_of_all / f"odd{dist.get_rank()}.jsonl").write_text(
        "".join(json.dumps({"text": f"a{chr(65 + i)}"}) + "\n" for i in range(9))
    )
    odd = str(tmp_path_of_all / f"odd{dist.get_rank()}.jsonl")
    for stage in ("validate", "predict"):
        module = Watched()
        trainer = quiet_trainer(strategy="ddp", use_distributed_sampler=True)
        data = data_module(tmp_path_of_all, validation=odd, predict=odd)
        getattr(trainer, stage)(module, datamodule=data, **({"verbose": False} if stage == "validate" else {}))
        shares = everyones(module.evaluated)
        assert [len(share) for share in shares] == [5, 5]
        assert set(itertools.chain(*shares)) == set(range(9))


@ranks(2)
def test_ranks_that_build_the_cache_together_get_one_entry(tmp_path_of_all: Path) -> None:
    data = data_module(tmp_path_of_all, tokenizer=tiny_tokenizer())
    dist.barrier()
    data.setup("fit")
    dist.barrier()
    assert len(list((tmp_path_of_all / "cache").iterdir())) == 1
    first = next(iter(data.train_dataloader()))["input_ids"]
    assert all(torch.equal(first, other) for other in everyones(first))
