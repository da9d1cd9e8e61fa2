"""Optimizers of torch over stages and cut layers: those that cannot step are refused by name, others set up to."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch.distributed.tensor import DTensor
from torch.optim import ASGD, LBFGS, SGD, Adafactor, Adagrad, Optimizer, Rprop, SparseAdam

from lightning_swift.errors import ConfigurationError

__all__ = ["naming_empty_stages", "prepare_optimizers"]

_REASONS: dict[type[Optimizer], str] = {
    LBFGS: "chooses its steps by all gradients at once, and each rank would choose by those of its stages",
    SparseAdam: "needs sparse gradients, which parameters cut over ranks do not have",
}
# Those that can where a stage has its parameters whole.
_REASONS_OF_PARTS: dict[type[Optimizer], str] = {
    Adafactor: "takes norms of rows and columns in ways that torch 2.13 does not know for matrices cut over ranks",
    Rprop: "picks elements by masks, which torch 2.13 does not know for parameters cut over ranks",
}
# Ways to be quick that change no number: torch knows no fused kernel of these for sharded parameters, and the foreach
# loop of ASGD puts cut layers and norms, which lie on different meshes, into one call.
_WITHOUT: tuple[tuple[type[Optimizer], str], ...] = ((SGD, "fused"), (Adagrad, "fused"), (ASGD, "foreach"))


@contextmanager
def naming_empty_stages(rank: str) -> Generator[None]:
    """Say why an optimizer that is made inside has no parameters.

    Args:
        rank: What to call this rank.

    Raises:
        ConfigurationError: There is such an optimizer.
    """
    try:
        yield
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ConfigurationError(
            f"the stages of {rank} have none of the parameters that an optimizer is made for.",
            where="configure_optimizers",
            fix="Freeze what is not to be trained (requires_grad_(False) in configure_model), and give the optimizer "
            "all parameters that still require gradients; this strategy sees to ranks that have none.",
        ) from error


def prepare_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse what cannot work, and switch off what torch would stumble over.

    Raises:
        ConfigurationError: An optimizer of torch that does not step over sharded parameters as over whole ones.
    """
    for optimizer in optimizers:
        in_parts = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        reasons = {**_REASONS, **_REASONS_OF_PARTS} if in_parts else _REASONS
        reason = next((reason for kind, reason in reasons.items() if isinstance(optimizer, kind)), None)
        if reason is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} {reason}.",
                where="configure_optimizers",
                fix="Use one that treats each element by itself, such as AdamW, Adam, NAdam, RAdam, RMSprop, Adagrad, "
                "Adadelta, Adamax, ASGD or SGD.",
            )
        for kind, switch in _WITHOUT:
            if in_parts and isinstance(optimizer, kind):
                for group in optimizer.param_groups:
                    group[switch] = False
