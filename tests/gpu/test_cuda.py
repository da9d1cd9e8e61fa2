"""What only a card can show: NCCL, evaluation before training, pinned host memory, devices after the fit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A process of its own, so that this one never touches CUDA and can go on to start CPU ranks.
SCRIPT = """
import sys
import torch
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer
from lightning_swift import FSDPBF16Strategy, TensorPipelineStrategy

where, folder = sys.argv[1:]
offload, losses = where == "offload", {}
for accelerator in ("cpu", "gpu"):
    module = UserModule()
    if where == "stage":
        # One, of which nothing is cut or cast: plain parameters, which no group moves.
        strategy = TensorPipelineStrategy("32-true", pipeline_parallel_size=1, tensor_parallel_size=1)
    else:
        strategy = FSDPBF16Strategy("32-true", cpu_offload=offload and accelerator == "gpu")
    trainer = quiet_trainer(accelerator=accelerator, devices=1, strategy=strategy, max_steps=4, gradient_clip_val=0.5,
                            limit_val_batches=1)
    data = loader(Tokens(16), batch_size=4)
    # Sanity validation comes first: on NCCL Lightning would run it under inference_mode.
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.save_checkpoint(f"{folder}/{accelerator}.ckpt")
    losses[accelerator] = module.losses
    expected = "cpu" if offload or accelerator == "cpu" else "cuda"
    assert all(p.device.type == expected for p in module.parameters())
# Other kernels, other orders of summation: float32 on both, four steps.
assert torch.allclose(torch.tensor(losses["cpu"]), torch.tensor(losses["gpu"]), atol=1e-3), losses
"""


@pytest.mark.parametrize("where", ["device", "offload", "stage"])
def test_a_fit_on_a_card_is_one_on_the_cpu(where: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), where, str(tmp_path)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
