"""The optimizers that ``CausalLM`` can be asked for: what they are, how they resume, where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_swift.errors import ConfigurationError
from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.zero import ZeROStrategy
from tests.harness.models import Tokens, quiet_trainer, tiny_config
from tests.harness.ranks import ranks


def fit(optimizer: Any, steps: int, strategy: Any, resume: Path | None = None) -> Any:
    module = CausalLM(tiny_config(layers=1), lr=1e-2, weight_decay=0.1, optimizer=optimizer)
    trainer = quiet_trainer(strategy=strategy, max_steps=steps)
    # One batch an epoch, so that a resumed run goes on with the batch that the other has.
    trainer.fit(module, DataLoader(Tokens(2), batch_size=2), ckpt_path=resume)
    return trainer


@ranks(1)
def each_optimizer(folder: str) -> None:
    for name, kind in (("sgd", "SGD"), ("adamw", "AdamW"), ("adamw_fused", "AdamW"), ("adamw_8bit", "AdamW8bit")):
        through = fit(name, 4, DDPBF16Strategy("32-true"))
        assert type(through.optimizers[0]).__name__ == kind
        assert (through.optimizers[0].param_groups[0].get("fused") is True) == (name == "adamw_fused")
        half = fit(name, 2, DDPBF16Strategy("32-true"))
        path = Path(folder) / f"{name}.ckpt"
        half.save_checkpoint(path)
        resumed = fit(name, 4, DDPBF16Strategy("32-true"), path)
        states = [t.optimizers[0].state for t in (through, resumed)]
        pairs = zip(*(t.lightning_module.named_parameters() for t in (through, resumed)), strict=True)
        for (weight_name, ours), (_, theirs) in pairs:
            assert torch.equal(ours, theirs), (name, weight_name)
            assert states[0][ours].keys() == states[1][theirs].keys()
        if name == "adamw_8bit":
            kinds = {value.dtype for state in states[1].values() for value in state.values() if torch.is_tensor(value)}
            assert torch.uint8 in kinds
    for strategy in (FSDPBF16Strategy("32-true"), ZeROStrategy(2, "32-true")):
        with pytest.raises(ConfigurationError, match="needs whole parameters"):
            fit("adamw_8bit", 1, strategy)


def test_each_optimizer_trains_and_resumes(tmp_path: Path) -> None:
    each_optimizer(str(tmp_path))
