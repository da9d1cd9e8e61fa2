"""Sees to it that the ranks of one model-parallel group work on the same samples, and refuses when they do not."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, RandomSampler

from lightning_swift.errors import DataError, ModelError
from lightning_swift.parallel.mesh import MeshAxis

__all__ = ["FactorCheck", "draws_masks", "refuse_different_batches", "share_generators", "share_randomness"]


def refuse_different_batches(batch: object, mesh: DeviceMesh, device: torch.device) -> None:
    """Compare the batch of every rank with those of the ranks that should have the same. All ranks call it.

    Raises:
        DataError: On all ranks, if it differs within any model-parallel group.
    """
    mine = torch.tensor([_fingerprint(batch)], device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    names = [axis.value for axis in MeshAxis]
    order = [names.index(axis) for axis in (MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD, MeshAxis.PP, MeshAxis.TP)]
    # One row for each share of the data, of the ranks that should have it.
    ranks = mesh.mesh.permute(order).flatten(2).flatten(0, 1)
    values = torch.cat(gathered).cpu()[ranks]
    differing = (values != values[:, :1]).any(dim=1)
    if differing.any():
        groups = ", ".join(str(group) for group in ranks[differing].tolist()[:4])
        raise DataError(
            f"ranks of one model-parallel group got different batches: ranks {groups}.",
            where="first batch",
            fix="Leave the sampler to the Trainer, or use trainer.distributed_sampler_kwargs (num_replicas and rank of "
            "the data-parallel ranks) in a sampler or iterable data set of your own, and draw random numbers from a "
            "generator that is seeded alike on these ranks.",
        )


class FactorCheck:
    """Compares what the first losses are multiplied with over all ranks.

    Gradients have been averaged over the data-parallel ranks when they are multiplied, so different factors, such as
    a weight of each rank's batch, would silently mean something else than under other strategies.

    Args:
        count: Number of backward passes to look at.
    """

    def __init__(self, count: int = 4) -> None:
        self._left = count

    def __call__(self, factor: Tensor) -> None:
        """Refuse factors that differ. All ranks call it.

        Raises:
            ModelError: On all ranks.
        """
        if self._left == 0:
            return
        self._left -= 1
        ends = torch.stack([factor.detach().float().reshape(()), -factor.detach().float().reshape(())])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        largest, smallest = ends[0].item(), -ends[1].item()
        if not math.isclose(largest, smallest, rel_tol=1e-4):
            raise ModelError(
                f"the loss is multiplied with {smallest:g} on one rank and {largest:g} on another.",
                where="training_step",
                fix="Under stages gradients are averaged over ranks before that: use the same factor on all ranks. To "
                "weigh batches by their tokens, pass num_items_in_batch=1 to the model for a sum, or use CausalLM.",
            )


def share_randomness(loader: object, *, seed: int, share: int) -> None:
    """Have the ranks of one share of the data shuffle and augment alike, with and without worker processes.

    Lightning seeds workers by the global rank, and torch from the process's own generator, which dropout and the like
    move differently on different stages.

    Args:
        loader: A loader as the user made it; what its owner has decided is left alone.
        seed: The same on all ranks.
        share: Index of the share of the data.
    """
    if not isinstance(loader, DataLoader):
        return
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=share)
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(seed + share)
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = torch.Generator().manual_seed(seed + share)


def draws_masks(module: nn.Module) -> bool:
    """Whether any part of ``module`` drops something out, as a layer or by an attribute like ``attention_dropout``."""
    return any(
        isinstance(value, float) and value > 0.0 and ("drop" in name or (name == "p" and "Drop" in type(part).__name__))
        for part in module.modules()
        for name, value in vars(part).items()
    )


def share_generators(group: dist.ProcessGroup, device: torch.device) -> Callable[[nn.Module, object], None]:
    """A hook before a model's forward pass in training that brings torch's default generators of ``group`` in step.

    Tensor-parallel ranks that drop different elements of what all of them hold whole would train different copies of
    the weights that are not cut, in silence. Seeds that depend on the rank would do, or a number that one rank alone
    draws. Where generators are in step already, as they are by default, it changes nothing.
    """

    def share(module: nn.Module, _: object) -> None:
        if not module.training:
            return
        torch.set_rng_state(of_first_rank(torch.get_rng_state()))
        if device.type == "cuda":
            torch.cuda.set_rng_state(of_first_rank(torch.cuda.get_rng_state(device)), device)

    def of_first_rank(state: Tensor) -> Tensor:
        shared = state.to(device)
        dist.broadcast(shared, group=group, group_src=0)
        return shared.cpu()

    return share


def _fingerprint(batch: object) -> int:
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, batch)
    return int.from_bytes(digest.digest(), signed=True)


def _add(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    elif is_dataclass(value):
        _add(digest, vars(value))
    elif isinstance(value, str | bytes | bool | int | float | None):
        digest.update(repr(value).encode())
