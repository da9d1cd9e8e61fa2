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

# What of torch's Adam could be lost in host memory: where decay is added, and what DeepSpeed's has no counterpart for.
OPTIMIZERS: list[tuple[type[Adam], dict[str, Any]]] = [
    (Adam, {"weight_decay": 0.1}),
    (AdamW, {"weight_decay": 0.1}),
    (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (Adam, {"amsgrad": True}),
    (AdamW, {"maximize": True}),
]


class Doubled(One):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


@ranks(1, deadline=90)
def replaced() -> None:
    for kind, options in OPTIMIZERS:
        ours, theirs = (nn.Parameter(torch.linspace(0.5, 1.5, 8)) for _ in range(2))
        optimizers = (
            offloaded_adam(kind([ours], lr=0.1, **options), bf16_states=False),
            kind([theirs], lr=0.1, **options),
        )
        # Gradients that fall, so that amsgrad's largest second moment matters.
        for size in (1.0, 0.1, 0.1, 0.1):
            for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
                parameter.grad = torch.linspace(-size, size, 8)
                optimizer.step()
        # DeepSpeed computes 1 - 0.999 in float32, to 6e-5 of it; half of that is in each of 4 steps of 0.1. Decay in
        # the wrong place is worth 1e-3 and more.
        assert torch.allclose(ours, theirs, rtol=0, atol=1.2e-5), (kind, options, ours, theirs)
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
