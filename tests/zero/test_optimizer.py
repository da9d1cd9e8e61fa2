"""What becomes of the user's optimizer and of hooks that DeepSpeed replaces; the device that DeepSpeed computes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._zero_engine import choose_accelerator
from lightning_swift.strategies._zero_optimizer import offloaded_adam
from lightning_swift.strategies.zero import ZeROStrategy
from tests.harness.models import quiet_trainer
from tests.harness.ranks import ranks
from tests.zero.test_features import One

pytestmark = pytest.mark.usefixtures("ops")

# Of a second group.
OTHER = {"lr": 0.05, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.3}
# What of torch's Adam could be lost in host memory: where decay is added, and what DeepSpeed's has no counterpart for.
OPTIMIZERS: list[tuple[type[Adam], dict[str, Any], dict[str, Any]]] = [
    (Adam, {"weight_decay": 0.1}, OTHER),
    (AdamW, {"weight_decay": 0.1}, OTHER),
    (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, OTHER),
    (Adam, {"weight_decay": 0.1}, {**OTHER, "decoupled_weight_decay": True}),
    (Adam, {"amsgrad": True}, OTHER),
    (AdamW, {"maximize": True}, OTHER),
]


class Own(AdamW):
    """Somebody's own, which may compute anything."""


class Doubled(One):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


def stepped(*, ours: bool, kind: type[Adam], options: dict[str, Any], other: dict[str, Any]) -> list[nn.Parameter]:
    """Parameters of two groups after four steps of torch's optimizer, or of what replaces it."""
    parameters = [nn.Parameter(torch.linspace(0.5, 1.5, 8)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], **other}]
    optimizer: torch.optim.Optimizer = kind(groups, lr=0.1, **options)
    if ours:
        optimizer = offloaded_adam(optimizer, bf16_states=False)
    # Gradients that fall, so that amsgrad's largest second moment matters.
    for size in (1.0, 0.1, 0.1, 0.1):
        for parameter in parameters:
            parameter.grad = torch.linspace(-size, size, 8)
        optimizer.step()
    return parameters


def check_states() -> None:
    for bf16 in (False, True):
        parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = offloaded_adam(AdamW([parameter]), bf16_states=bf16)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == (torch.bfloat16 if bf16 else torch.float32)


@ranks(1, deadline=90)
def replaced() -> None:
    for kind, options, other in OPTIMIZERS:
        found, expected = (stepped(ours=ours, kind=kind, options=options, other=other) for ours in (True, False))
        for ours, theirs in zip(found, expected, strict=True):
            # DeepSpeed computes 1 - 0.999 in float32, to 6e-5 of it; half of that is in each of 4 steps of 0.1. Decay
            # in the wrong place, as options of the other group, is worth 1e-3 and more.
            assert torch.allclose(ours, theirs, rtol=0, atol=1.2e-5), (kind, options, ours, theirs)
    own = Own([nn.Parameter(torch.ones(8))])
    assert offloaded_adam(own, bf16_states=False) is own
    check_states()
    with pytest.warns(UserWarning, match=r"Doubled\.backward is not called"):
        quiet_trainer(strategy=ZeROStrategy(2, "32-true"), max_steps=1).fit(Doubled(), [0])


@ranks(1)
def accelerators() -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    # What DeepSpeed chooses by itself on a machine with a GPU.
    set_accelerator(CUDA_Accelerator())
    choose_accelerator("cpu")
    assert get_accelerator().device_name() == "cpu"
    choose_accelerator("cuda")
    assert get_accelerator().device_name() == "cuda"
    with pytest.raises(ConfigurationError, match="not supported on 'mps'"):
        choose_accelerator("mps")


def test_adam_in_host_memory_is_torch_s_and_a_hook_that_is_not_called_is_named() -> None:
    replaced()


def test_deepspeed_computes_where_the_trainer_does() -> None:
    accelerators()
