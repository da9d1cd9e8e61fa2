"""Where DeepSpeed keeps the elements of each parameter: masters, moments and working copies of ZeRO-1, 2 and 3.

DeepSpeed joins the trainable parameters of a group into one flat FP32 vector (stage 3: one per sub-group) of which each
rank holds a part. One class per layout says which run of which vector a parameter is; nothing here communicates except
where it says so. Of deepspeed 0.19.8; its optimizers have no public interface for this but the one per parameter that
gathers.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swift.checkpoint.pieces import Pieces

__all__ = ["Partitions", "partitions_of"]


@dataclass(frozen=True)
class _Fragment:
    """``length`` elements of a parameter, from its element ``first``, at ``start`` of flat vector ``vector``."""

    vector: int
    start: int
    first: int
    length: int


class Partitions(abc.ABC):
    """What this rank holds of an engine's parameters.

    Attributes:
        inner: The optimizer that steps on the flat vectors; None when the engine only evaluates.
        members: Parameters of each flat vector, in order.
        owners: Index of the group in ``inner.param_groups`` of each flat vector.
    """

    inner: Optimizer | None = None
    members: list[list[nn.Parameter]]
    owners: list[int]

    def __init__(self) -> None:
        self.members, self.owners = [], []
        self._fragments: dict[Tensor, _Fragment] = {}

    def whole(self, parameter: Tensor) -> Tensor | Pieces:
        """The parameter as it is saved: its FP32 master where it has one, else what there is of it here."""
        fragment = self._fragments.get(parameter)
        return self._unowned(parameter) if fragment is None else self._run_of(parameter, fragment, None)

    def state_of(self, parameter: Tensor, key: str) -> Pieces:
        """A state of the optimizer that has an element for each of the parameter's."""
        return self._run_of(parameter, self._fragments[parameter], key)

    def states(self, vector: int) -> dict[str, Any]:
        """The optimizer's state of a flat vector; entries of its size are flat vectors themselves."""
        assert self.inner is not None
        states: dict[str, Any] = self.inner.state[self.flat(vector)]
        return states

    def create_state(self, vector: int, key: str, dtype: torch.dtype) -> None:
        """Make a state of zeros, unless it is there."""
        self._bring_in(vector)
        states = self.states(vector)
        if key not in states:
            states[key] = torch.zeros_like(self.flat(vector), dtype=dtype, requires_grad=False)

    def is_per_element(self, vector: int, value: Any) -> bool:
        """Whether an entry of the optimizer's state has an element for each one of the flat vector."""
        return isinstance(value, Tensor) and value.dim() == 1 and value.shape == self.flat(vector).shape

    def shape(self, parameter: Tensor) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def before_loading(self) -> None:  # noqa: B027  # most layouts have nothing to do here
        """Drop gathered copies, which would be out of date."""

    @abc.abstractmethod
    def after_loading(self) -> None:
        """Make the working copies from the masters. A collective call."""

    def release(self) -> None:  # noqa: B027  # most layouts have nothing to do here
        """Give back the memory that a look at swapped vectors has taken."""

    def _bring_in(self, vector: int) -> None:  # noqa: B027  # most layouts have nothing to do here
        """Have a flat vector and its states in memory."""

    @abc.abstractmethod
    def flat(self, vector: int) -> Tensor:
        """A flat vector of FP32 masters, the key in ``inner.state``."""

    def _values(self, vector: int, key: str | None) -> Tensor:
        self._bring_in(vector)
        flat = self.flat(vector)
        values: Tensor = flat if key is None else self.states(vector)[key]
        return values.detach()

    def _unowned(self, parameter: Tensor) -> Tensor | Pieces:
        return parameter.detach()

    def _run_of(self, parameter: Tensor, fragment: _Fragment, key: str | None) -> Pieces:
        def run() -> Tensor:
            return self._values(fragment.vector, key).narrow(0, fragment.start, fragment.length)

        dtype = self.flat(fragment.vector).dtype if key is None else self.states(fragment.vector)[key].dtype
        return Pieces(self.shape(parameter), dtype, first=fragment.first, length=fragment.length, run=run)


class _Gathered(Partitions):
    """Stages 1 and 2: every rank has every parameter; FP32 masters and moments are cut."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer
        # BF16_Optimizer (stage 1 in BF16 on the device) has other names for the same things.
        bf16 = hasattr(optimizer, "fp32_groups_flat_partition")
        self._vectors = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
        self.inner = optimizer.optimizer
        self.members = list(optimizer.bf16_groups if bf16 else optimizer.bit16_groups)
        self.owners = list(range(len(self.members)))
        for vector, parameters in enumerate(self.members):
            for parameter in parameters:
                self._fragments[parameter] = _fragment_in(vector, parameter)

    @override
    def after_loading(self) -> None:
        self._optimizer.update_lp_params()

    @override
    def flat(self, vector: int) -> Tensor:
        flat: Tensor = self._vectors[vector]
        return flat


class _Whole(Partitions):
    """No optimizer, and every rank has every parameter: evaluation at stages 1 and 2."""

    @override
    def after_loading(self) -> None:
        """Nothing: the parameters themselves were filled."""

    @override
    def flat(self, vector: int) -> Tensor:
        raise IndexError(vector)


class _Partitioned(Partitions):
    """Stage 3: parameters are cut as well, each one by itself.

    With the optimizer on disk one flat vector at a time is read into memory, with its states, and written back only
    while a checkpoint is being loaded.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._present: int | None = None
        self._loading = False
        # Without an optimizer DeepSpeed puts its parameter manager in the place of one.
        if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
            return
        self.inner = optimizer.optimizer
        self.members = list(optimizer.fp16_groups)
        self.owners = [optimizer.sub_group_to_group_id[vector] for vector in range(len(self.members))]
        for parameter in (p for parameters in self.members for p in parameters):
            vector, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first, length = _cut(parameter, length)
            self._fragments[parameter] = _Fragment(vector, start, first, length)

    @override
    def before_loading(self) -> None:
        self._loading = True
        manager = getattr(self._optimizer, "parameter_offload", self._optimizer)
        manager.partition_all_parameters()

    @override
    def after_loading(self) -> None:
        for vector in range(len(self.members)):
            self._bring_in(vector)
            self._optimizer._reassign_or_swap_out_partitioned_parameters(vector)
        self.release()
        self._loading = False

    @override
    def release(self) -> None:
        if self._present is None:
            return
        vector, self._present = self._present, None
        if self._loading:
            self._optimizer._optimizer_states_and_gradient_swap_out(vector)
        else:
            self._optimizer._release_swap_buffers(vector)

    @override
    def _bring_in(self, vector: int) -> None:
        if vector == self._present or not self._optimizer._swappable_optimizer_subgroup(vector):
            return
        self.release()
        self._optimizer._optimizer_states_and_gradient_swap_in(vector)
        self._present = vector

    @override
    def flat(self, vector: int) -> Tensor:
        flat: Tensor = self._optimizer.fp32_partitioned_groups_flat[vector]
        return flat

    @override
    def _unowned(self, parameter: Tensor) -> Tensor | Pieces:
        part: Tensor | None = getattr(parameter, "ds_tensor", None)
        if part is None:
            return parameter.detach()
        first, length = _cut(parameter, part.numel())
        held = part.detach().view(-1).narrow(0, 0, length)
        return Pieces(self.shape(parameter), part.dtype, first=first, length=length, run=lambda: held)


def partitions_of(engine: Any) -> Partitions:
    """The layout of a DeepSpeed engine."""
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_weights():
        return _Partitioned(optimizer)
    if optimizer is None or isinstance(optimizer, Optimizer):
        return _Whole()
    return _Gathered(optimizer)


def _cut(parameter: Any, length: int) -> tuple[int, int]:
    """First element and number of elements of a parameter that this rank holds; the last part is padded."""
    first = dist.get_rank(group=parameter.ds_process_group) * length
    return first, max(0, min(length, parameter.ds_numel - first))


def _fragment_in(vector: int, parameter: Any) -> _Fragment:
    mapping = parameter._hp_mapping
    if mapping is None:
        return _Fragment(vector, 0, 0, 0)
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    return _Fragment(vector, high.start, low.start, low.numel)
