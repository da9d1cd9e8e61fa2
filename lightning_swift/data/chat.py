"""``ChatDataModule``: conversations, prompts with completions, or text, as batches for a language model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_swift.data import limits, progress
from lightning_swift.data.collate import PadBatch
from lightning_swift.data.sampler import DataOrder, Position, ResumableLoader, ResumableSampler, TrainingStream
from lightning_swift.data.tokenized import Statistics, Tokenization, TokenizedData
from lightning_swift.data.tokenizer import load_tokenizer
from lightning_swift.errors import ConfigurationError, DataError

__all__ = ["ChatDataModule"]

_STAGES: dict[str, tuple[str, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
}
_SPLIT_SEED = 2**32 - 1


class ChatDataModule(LightningDataModule):
    """Text data for causal language models, with exact targets and exact resumption.

    Sources are JSON Lines, parquet, or a folder written by ``datasets``' ``save_to_disk``. A record has ``messages``
    (roles and contents, rendered by the tokenizer's chat template), or ``prompt`` and ``completion``, or ``text``.
    Everything is read, checked and tokenised before the model is built; the result is cached.

    Batches are dicts of int64 tensors of shape ``[batch, length]``: ``input_ids``, ``attention_mask`` and ``labels``
    (-100 where the loss does not look), padded on the right. Prediction batches hold prompts alone, padded on the left
    so that they can be continued, and no labels.

    Training batches are always full: the records that do not fill a last batch on every rank are left out of that
    epoch (another few with each permutation). All ranks have the same number of batches. Evaluation sees every record;
    at most ``ranks - 1`` are repeated at the end to keep ranks in step.

    The order depends on ``seed`` and epoch only, and the position is kept in samples: a run that resumes in the middle
    of an epoch, on any number of ranks, goes on with the next sample. Pipeline and tensor parallel peers get the same.

    Args:
        train: Training records.
        validation: Validation records.
        test: Records for ``Trainer.test``.
        predict: Records whose prompts ``Trainer.predict`` gets.
        tokenizer: A tokenizer, the folder of one, or None for the ``tokenizer`` of the LightningModule.
        max_length: Longest record in tokens.
        batch_size: Records per batch and rank.
        num_workers: Loader processes per rank. Records are tokenised already, so few are needed.
        loss_on: ``assistant`` counts assistant messages, completions and plain text; ``all`` counts every token.
        too_long: ``error`` stops at a record over ``max_length``, ``drop`` leaves it out, ``truncate`` cuts its end.
        max_masked: Largest share of records without any target that is accepted; they are left out and counted.
        shuffle: Another order in each epoch. Without it, file order.
        seed: Seed of the order and of the validation split.
        validation_fraction: Share of the training records to set aside, instead of ``validation``.
        pad_to_multiple_of: Batch lengths are rounded up to a multiple of this.
        ignore_columns: Fields of records that are not used; any other unknown field is an error.
        cache_dir: Folder for tokenised data; by default inside the cache of ``datasets``.

    Raises:
        ConfigurationError: If an argument is out of range or contradicts another.
        DataError: From ``setup``, if the data cannot be trained on; names file and line.
    """

    def __init__(
        self,
        train: str | None = None,
        *,
        validation: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        max_length: int = 2048,
        batch_size: int = 4,
        num_workers: int = 2,
        loss_on: Literal["assistant", "all"] = "assistant",
        too_long: Literal["error", "drop", "truncate"] = "error",
        max_masked: float = 0.1,
        shuffle: bool = True,
        seed: int = 0,
        validation_fraction: float | None = None,
        pad_to_multiple_of: int = 1,
        ignore_columns: list[str] | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        ignored = tuple(sorted(ignore_columns or ()))
        self._sources = {"train": train, "validation": validation, "test": test, "predict": predict}
        self._options = Tokenization(max_length, loss_on, too_long, max_masked, ignore_columns=ignored)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed
        self.validation_fraction = validation_fraction
        self.pad_to_multiple_of = pad_to_multiple_of
        self._check()
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        if (
            validation is None
            and validation_fraction is None
            and type(self).val_dataloader is ChatDataModule.val_dataloader
        ):
            # The mere presence of the hook is what Lightning takes for validation data.
            self.val_dataloader = MethodType(LightningDataModule.val_dataloader, self)  # type: ignore[method-assign]
        self._tokenizer = tokenizer
        # Each a datasets.Dataset or a torch Subset of one.
        self._data: dict[str, Any] = {}
        self._statistics: dict[str, Statistics] = {}
        self._start = Position()
        self._saved_batch: int | None = None
        self._stream: TrainingStream | None = None
        self._reload_every: int | None = None

    def _check(self) -> None:
        limits.require_option(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        limits.require_option(self.num_workers >= 0, "num_workers", self.num_workers, "0 or more")
        limits.require_option(self.pad_to_multiple_of >= 1, "pad_to_multiple_of", self.pad_to_multiple_of, "1 or more")
        limits.require_option(self.seed >= 0, "seed", self.seed, "0 or more")
        if (fraction := self.validation_fraction) is not None:
            limits.require_option(0 < fraction < 1, "validation_fraction", fraction, "a share between 0 and 1")
            both = self._sources["validation"]
            limits.require_option(both is None, "validation", both, "either it or validation_fraction")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in use.

        Raises:
            ConfigurationError: If none was given and the LightningModule has none.
        """
        if isinstance(self._tokenizer, str):
            self._tokenizer = load_tokenizer(self._tokenizer)
        found = self._tokenizer
        if found is None and self.trainer is not None:
            found = getattr(self.trainer.lightning_module, "tokenizer", None)
        if found is None:
            raise ConfigurationError(
                "No tokenizer was given and the LightningModule has no attribute `tokenizer`.",
                where="ChatDataModule(tokenizer=...)",
                fix="Give a tokenizer or the folder of one.",
            )
        return found

    @property
    def samples_seen(self) -> int:
        """Samples that all data-parallel ranks together have trained on since the first step of the run."""
        return self._position().samples_seen

    @property
    def statistics(self) -> dict[str, Statistics]:
        """What was read, by ``train``, ``validation``, ``test`` and ``predict``; filled by ``setup``."""
        return dict(self._statistics)

    @override
    def prepare_data(self) -> None:
        """Fill the cache in one process per node."""
        try:
            fn = None if self.trainer is None else self.trainer.state.fn
            for name in self._needed("fit" if fn is None else fn.value):
                self._read(name)
        except DataError:
            # Raised here it would reach one rank and leave the others waiting; setup raises it again, on all of them.
            return

    @override
    def setup(self, stage: str) -> None:
        """Read what ``stage`` needs from the cache and check it against the model and the number of ranks."""
        for name in self._needed(stage):
            data = self._read(name)
            limits.check_model(
                None if self.trainer is None else self.trainer.lightning_module,
                self.tokenizer,
                largest_id=data.statistics.largest_id,
                max_length=self._options.max_length,
                where=f"{name} data {self._sources[name]}",
            )
            if self._statistics.get(name) != data.statistics:
                rank_zero_info(f"{name} data {self._sources[name]}: {data.statistics}")
            self._data[name], self._statistics[name] = data.dataset, data.statistics
        if self.validation_fraction is not None and stage in ("fit", "validate"):
            self._split()
        if stage == "fit":
            self._setup_training()

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """This rank's training batches, from the current position in the data on."""
        ranks, rank = self._ranks()
        start = self._start if self._stream is None else self._stream.begin_pass()
        order = self._order()
        if self.trainer is None:
            self._stream, counted = TrainingStream(order, ranks * self.batch_size, start=start, trained=lambda: 0), 0
        else:
            self._stream, counted = progress.resume(
                self.trainer, order, ranks * self.batch_size, start=start, saved_batch=self._saved_batch
            )
            self._saved_batch = None
            self._reload_after(self.trainer, counted + self._stream.batches_left() != self._stream.epoch_batches)
        data = self._data["train"]
        sampler = ResumableSampler(data, self._stream, num_replicas=ranks, rank=rank, counted_before=counted)
        return self._loader(data, sampler)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """This rank's validation batches."""
        return self._evaluation("validation")

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        """This rank's test batches."""
        return self._evaluation("test")

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """This rank's prompts."""
        return self._evaluation("predict")

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position after the last trained batch, and what decides the order."""
        if "train" not in self._data:
            return {}
        return {**asdict(self._position()), **asdict(self._order()), "global_batch": self._global_batch()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position of :meth:`state_dict`.

        Raises:
            DataError: If training goes on with other records or in another order.
        """
        self._start = Position(*(state_dict[name] for name in ("epoch", "offset", "samples_seen")))
        self._saved_batch = state_dict["global_batch"]
        self._stream = None
        saved = DataOrder(*(state_dict[name] for name in ("records", "seed", "shuffle")))
        if "train" in self._data and saved != self._order():
            raise DataError(
                f"The checkpoint was made with {saved} and the run resumes with {self._order()}.",
                where=f"train data {self._sources['train']}",
                fix="Resume with the same data, seed and shuffle, or start a new run from the weights.",
            )

    def _needed(self, stage: str) -> list[str]:
        names = _STAGES[stage]
        if self.validation_fraction is not None and stage == "validate":
            names = ("train",)
        missing = names[0] if self._sources[names[0]] is None else None
        if missing is not None:
            raise ConfigurationError(
                f'"{stage}" needs data and none was given.',
                where=f"ChatDataModule({missing}=...)",
                fix="Give a JSON Lines or parquet file, or a datasets folder.",
            )
        return [name for name in names if self._sources[name] is not None]

    def _read(self, name: str) -> TokenizedData:
        options = replace(self._options, prompts_only=name == "predict")
        source = Path(str(self._sources[name]))
        return TokenizedData.make(source, self.tokenizer, options, split=name, cache_dir=self._cache_dir)

    def _split(self) -> None:
        whole = self._data["train"]
        held_out = max(1, round(len(whole) * (self.validation_fraction or 0)))
        # A seed of its own: the split must not follow the permutation of any epoch.
        order = np.random.default_rng((self.seed, _SPLIT_SEED)).permutation(len(whole))
        self._data["validation"] = Subset(whole, sorted(order[:held_out].tolist()))
        self._data["train"] = Subset(whole, sorted(order[held_out:].tolist()))

    def _setup_training(self) -> None:
        records, needed = len(self._data["train"]), self._global_batch()
        if records < needed:
            raise DataError(
                f"{records} records are fewer than one batch on every rank: {needed // self.batch_size} data-parallel "
                f"ranks x batch_size {self.batch_size} = {needed}.",
                where=f"train data {self._sources['train']}",
                fix="Use a smaller batch_size, fewer ranks, or more records.",
            )
        fresh = self.trainer is None or progress.batches_trained(self.trainer) == 0
        self._start = Position() if fresh or self._stream is None else self._stream.begin_pass()
        self._stream, self._saved_batch = None, None

    def _reload_after(self, trainer: Any, partial: bool) -> None:
        """Have the loader requested again after a pass of another length: Lightning keeps the first one it sees."""
        if partial and self._reload_every is None:
            self._reload_every = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1
        elif not partial and self._reload_every is not None:
            trainer.reload_dataloaders_every_n_epochs = self._reload_every
            self._reload_every = None

    def _order(self) -> DataOrder:
        return DataOrder(len(self._data["train"]), self.seed, self.shuffle)

    def _position(self) -> Position:
        if self._stream is None:
            return self._start
        position = self._stream.position()
        over = self.trainer is not None and progress.pass_is_over(self.trainer)
        if position != self._stream.anchor and (over or self._stream.exhausted()):
            return self._stream.next_epoch(position)
        return position

    def _ranks(self) -> tuple[int, int]:
        """Number of data-parallel ranks and this one's place: equal on tensor and pipeline parallel peers."""
        share = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if share is None else (share["num_replicas"], share["rank"])

    def _global_batch(self) -> int:
        return self._ranks()[0] * self.batch_size

    def _evaluation(self, name: str) -> DataLoader[Any]:
        ranks, rank = self._ranks()
        data = self._data[name]
        # Lightning's own sampler for prediction gives ranks unequal numbers of batches: sharded models would hang.
        return self._loader(data, DistributedSampler(data, ranks, rank, shuffle=False), prompts=name == "predict")

    def _loader(self, data: Any, sampler: DistributedSampler[Any], *, prompts: bool = False) -> DataLoader[Any]:
        pad = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)
        kind: type[DataLoader[Any]] = ResumableLoader if isinstance(sampler, ResumableSampler) else DataLoader
        return kind(
            data,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=PadBatch(pad, self.pad_to_multiple_of, "left" if prompts else "right", with_labels=not prompts),
            pin_memory=torch.cuda.is_available(),
            drop_last=isinstance(sampler, ResumableSampler),
            persistent_workers=self.num_workers > 0,
        )
