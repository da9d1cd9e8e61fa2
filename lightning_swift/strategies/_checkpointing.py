"""Sharded checkpoints for any strategy of parallel processes: what Lightning calls to save and to resume."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swift.checkpoint import commit
from lightning_swift.checkpoint.faults import faultpoint
from lightning_swift.checkpoint.layout import META, MODEL_PREFIX, Manifest, RunRecord
from lightning_swift.checkpoint.safe_load import check_hashes, verify
from lightning_swift.checkpoint.sharded import Description, load_into, load_meta, read_index, save
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lightning_swift.strategies._checkpoint_base import PretrainedBase
from lightning_swift.strategies._checkpoint_file import OptimizerInFile, load_file
from lightning_swift.strategies._checkpoint_frozen import SaveFrozen
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel, find_model, tokenizer_of
from lightning_swift.strategies._checkpoint_meta import readable_meta
from lightning_swift.strategies._checkpoint_state import (
    Index,
    LoadRequest,
    Request,
    clean,
    model_state,
    optimizer_state,
    parameter_names,
    tied_names,
    without_aliases,
)
from lightning_swift.strategies._resume import NothingToRestore, count_as_saved, restarted, run_of, source_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["ShardedCheckpointing"]


class ShardedCheckpointing(ParallelStrategy):
    """Mixin that saves each rank's shards by the commit protocol and loads them at any number of ranks.

    It goes before the strategy's own base class. It needs ``lightning_module``, ``optimizers`` and, for the mesh
    sizes in the manifest, ``device_mesh``.

    A strategy whose state does not lie in the module as it is saved overrides some of these, and nothing of the
    protocol:

    * ``_saved_name(name)``: the name under which a tensor that the module knows as ``name`` is saved, a global one of
      the unsharded model; applied to a saved name it changes nothing. Enough for modules under other paths. Ranks may
      hold different names (stages of a pipeline); a name that several ranks or several parameters of one rank have (a
      tied copy on two stages) must have equal values everywhere: it is saved once and fills all of them.
    * ``_tied_names()``: alias to canonical name. A rank says what it knows; the manifest gets what all ranks say.
      Where both names of a tied pair lie on different ranks, ``_saved_name`` gives both the canonical name.
    * ``_saved_model()``: the Hugging Face model with its config and attribute path, where it is not simply found.
    * ``_model_state()`` and ``_optimizer_state(optimizer)``: what is saved, by saved name; keys as
      :mod:`~lightning_swift.strategies._checkpoint_state` forms them. Values are tensors, DTensors, or
      :class:`~lightning_swift.checkpoint.pieces.Pieces` for parts of a flat buffer.
    * ``_load_request(optimizers, stored, manifest)``: the counterpart, an object with ``state`` and ``install``.
    * ``_trained_names()``: saved names of the parameters that an optimizer has state for.
    * ``_load_file(path)``: the same for an ordinary checkpoint file of Lightning.
    """

    save_frozen: SaveFrozen = "auto"
    _run: RunRecord | None = None
    _base_of: tuple[pl.LightningModule, PretrainedBase] | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """The shards must exist before they are filled."""
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """``load_checkpoint`` fills the optimizers."""
        return False

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._run_record()
        if self._trainer.global_step:
            count_as_saved(self._trainer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._optimizer_state(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)

    def _mesh_sizes(self) -> dict[str, int]:
        """Number of ranks along each axis, for the manifest."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is None:
            return {"dp_replicate": self.world_size}
        return {name: mesh.size(axis) for axis, name in enumerate(mesh.mesh_dim_names or ())}

    def _saved_name(self, name: str) -> str:
        """The name under which the tensor that the module knows as ``name`` is saved."""
        return clean(name)

    def _tied_names(self) -> dict[str, str]:
        """Alias to canonical name, both as saved."""
        return tied_names(self._module, rename=self._saved_name)

    def _saved_model(self) -> HuggingFaceModel | None:
        """The one Hugging Face model of the module."""
        return find_model(self._module)

    def _model_state(self) -> dict[str, Any]:
        """What is saved of the model on this rank, by saved name."""
        return model_state(self._module, rename=self._saved_name)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What is saved of an optimizer on this rank."""
        return optimizer_state(self._module, optimizer, rename=self._saved_name)

    def _trained_names(self) -> set[str]:
        """Saved names of the parameters that were changed by an optimizer, frozen since or not."""
        names = parameter_names(self._module, rename=self._saved_name)
        return {names[p] for optimizer in self.optimizers for p in optimizer.state if optimizer.state[p] and p in names}

    def _pretrained(self) -> PretrainedBase:
        if self._base_of is None or self._base_of[0] is not self._module:
            self._base_of = (self._module, PretrainedBase(self._module, self._saved_model(), self._saved_name))
        return self._base_of[1]

    def _load_request(self, optimizers: Sequence[Optimizer], stored: Index, manifest: Manifest) -> LoadRequest:
        """What this rank wants of a checkpoint."""
        return Request(self._module, optimizers, stored, manifest.tied, rename=self._saved_name)

    def _load_file(self, path: Path, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Fill this rank's state from an ordinary checkpoint file; return the rest of it."""
        targets = [OptimizerInFile(optimizer) for optimizer in optimizers]
        return load_file(
            path,
            self._model_state(),
            targets,
            strict=self._module.strict_loading,
            rename=self._saved_name,
            elsewhere=self._names_elsewhere(),
        )

    def _names_elsewhere(self) -> frozenset[str]:
        """Saved names of tensors that only other ranks have. All ranks call it."""
        return frozenset()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write and commit ``checkpoint`` as a directory; every rank calls it.

        Raises:
            CheckpointError: Something failed on any rank; or the path is taken by another run or by something else.
                In that last case the checkpoint lies whole under a free name beside it, so no training is lost.
        """
        if storage_options is not None:
            raise ConfigurationError(
                f"{type(self).__name__} writes shards to a local or mounted directory and takes no storage_options.",
                where="save_checkpoint",
            )
        ranks = Ranks.current()
        path = Path(os.path.abspath(ranks.broadcast(filepath)))
        module, rest = self._module, dict(checkpoint)
        # A user's on_save_checkpoint may have put in entries under names of the module.
        weights = {self._saved_name(name): value for name, value in rest.pop("state_dict").items()}
        optimizers = rest.pop("optimizer_states", None)
        kept, tied = without_aliases(weights, self._tied_names())
        kept, base = self._pretrained().leave_out(kept, self._trained_names(), self.save_frozen)
        run = self._run_record()
        meta: dict[str, Any] = {}
        with Together(ranks, "checking the state", path) as step:
            refuge = None
            if ranks.rank == 0:
                meta = readable_meta(rest)
                refuge = commit.refuge(path, run.id)
            step.value = (refuge, tied)
        target, refusal = step.values[0][0]
        tied = {alias: name for _, own in step.values for alias, name in own.items()}
        model = self._saved_model()
        save(
            target,
            state=_prefixed(kept, optimizers or []),
            meta=meta,
            description=replace(
                self._describe(),
                global_step=int(checkpoint.get("global_step", 0)),
                tied=tied,
                huggingface=None if model is None else model.path,
                adapters=None if model is None else model.adapters,
                weights_only=optimizers is None,
                quantization=self._pretrained().quantization,
                base=base,
            ),
            extra_files=None if model is None else lambda d: model.write_files(d, tokenizer_of(module)),
        )
        if refusal is not None:
            raise type(refusal)(f"{refusal.what} Saved as {target.name} instead.", where=refusal.where, fix=refusal.fix)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model and, in a fit, the optimizers; return the rest for Lightning. Every rank calls it.

        Only safe types are read, whatever ``weights_only`` says: types of your own are allowed by
        ``torch.serialization.add_safe_globals``.

        Raises:
            CheckpointError: Of the kind that tells what is wrong with the checkpoint.
        """
        source = source_of(self._trainer, checkpoint_path)
        if source is None:
            return NothingToRestore()
        if source.is_file():
            meta = self._load_file(source, self._fitted_optimizers)
            self._pretrained().distrust()
            weights_alone = "optimizer_states" not in meta
        else:
            manifest = _verified(source)
            self._fill(source, manifest)
            meta = load_meta(source)
            weights_alone = manifest.weights_only
            if self._fitting and not weights_alone:
                self._run = run_of(self._trainer, source, manifest)
        if not (self._fitting and weights_alone):
            return meta
        rank_zero_info(f"{source} holds weights alone: they are loaded, and training starts from its first step.")
        return restarted(meta)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: ``load_checkpoint`` has filled the shards."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: ``load_checkpoint`` has filled the optimizers."""

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, on rank 0 only.

        Raises:
            CheckpointError: The path holds something else than a checkpoint.
        """
        faultpoint(commit.POINT_BEFORE_RETENTION)
        if self.is_global_zero:
            commit.remove(Path(filepath))

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer

    @property
    def _fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _fitted_optimizers(self) -> list[Optimizer]:
        return self.optimizers if self._fitting else []

    def _fill(self, source: Path, manifest: Manifest) -> None:
        optimizers = [] if manifest.weights_only else self._fitted_optimizers
        strict = self._module.strict_loading
        with Together(Ranks.current(), "preparing to load", source):
            request = self._load_request(optimizers, read_index(source), manifest)
            left_out = self._pretrained().before_loading(manifest, request.state)
        report = load_into(source, request.state, strict=strict, ignore=None if optimizers else _of_optimizer)
        self._pretrained().fill(manifest, left_out)
        request.install(frozenset(report.loaded))
        if report.missing or report.unexpected:
            rank_zero_info(
                f"{source}: {len(report.loaded)} names loaded, {len(report.missing)} not in the checkpoint, "
                f"{len(report.unexpected)} of the checkpoint not used."
            )

    def _run_record(self) -> RunRecord:
        """This run's record; made on first use, and kept for as long as the strategy lives. A collective call."""
        if self._run is None:
            started = datetime.now(UTC).isoformat(timespec="microseconds")
            self._run = Ranks.current().broadcast(RunRecord(id=secrets.token_hex(8), started=started))
        return self._run

    def _describe(self) -> Description:
        seen = getattr(self._trainer.datamodule, "samples_seen", None)  # type: ignore[attr-defined]
        return Description(
            run=self._run_record(),
            global_step=0,
            strategy=type(self).__name__,
            mesh=self._mesh_sizes(),
            samples_seen=seen() if callable(seen) else seen,
        )


def _prefixed(weights: Mapping[str, Any], optimizers: list[Mapping[str, Any]]) -> dict[str, Any]:
    state = {f"{MODEL_PREFIX}{name}": value for name, value in weights.items()}
    for number, flat in enumerate(optimizers):
        state |= {f"optimizer_{number}.{name}": value for name, value in flat.items()}
    return state


def _of_optimizer(name: str) -> bool:
    return name.startswith("optimizer_")


def _verified(source: Path) -> Manifest:
    """Check the whole checkpoint before anything is read from it; the ranks share the hashing between them."""
    ranks = Ranks.current()
    with Together(ranks, "verifying", source):
        try:
            manifest = verify(source, hashes=False)
        except CheckpointNotFoundError as error:
            if (source / META).exists():
                raise _foreign(source) from error
            raise
        by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        mine = {name: manifest.files[name] for name in by_size[ranks.rank :: ranks.size]}
        check_hashes(source, replace(manifest, files=mine))
    return manifest


def _foreign(source: Path) -> CheckpointError:
    return CheckpointError(
        "a sharded checkpoint of another strategy is here: it has no manifest, so nothing tells whether it is whole.",
        where=str(source),
        fix="Turn it into a file with `python -m lightning.fabric.utilities.consolidate_checkpoint DIR` and resume "
        "from that.",
    )
