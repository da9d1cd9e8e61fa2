"""Sharded training computes what unsharded training computes."""

from __future__ import annotations

import torch.distributed as dist

from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer
from tests.harness.ranks import ranks


def losses(strategy, *, steps=20, kind="llama", **kwargs):
    module = UserModule(kind)
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, **kwargs)
    data = loader(Tokens(), batch_size=4, rank=dist.get_rank(), world_size=dist.get_world_size())
    trainer.fit(module, data)
    return module.losses


@ranks(2)
def test_fp32_is_bitwise_ddp_at_two_ranks():
    assert losses(FSDPBF16Strategy("32-true")) == losses("ddp")


@ranks(2)
def test_bf16():
    curve = losses(FSDPBF16Strategy(), gradient_clip_val=1.0)
    assert curve[-1] < curve[0]
