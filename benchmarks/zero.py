"""Step time of ``ZeROStrategy`` under the Trainer beside a bare DeepSpeed loop and Lightning's own DeepSpeedStrategy.

All three have the same model, data, optimizer and DeepSpeed configuration. Lightning's strategy refuses CPUs, so here
it has the three overrides that let it run on them. DeepSpeed's kernels are built before anything is timed.
``python -m benchmarks.zero --stage 3``
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from typing import Any

from benchmarks.launch import table, torchrun
from benchmarks.paired import WARM_UP, Clock, row, take_turns
from benchmarks.workload import Module, Workload, fit, loader

WORKLOAD = Workload(hidden=512, layers=6, vocab=8192, batch=2, length=256)
CONTENDERS = {
    "bare": "hand-written loop, deepspeed.initialize",
    "ours": "Trainer + ZeROStrategy",
    "lightning": "Trainer + Lightning's DeepSpeedStrategy (made to run on CPUs)",
}
BASELINES = dict.fromkeys(CONTENDERS, "bare")


def main() -> None:
    """Launch the workers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    # The first run of all builds DeepSpeed's kernels, which takes minutes and is no step time.
    torchrun("benchmarks.zero", args.ranks, ["bare", "1", str(args.stage)])
    rounds = take_turns(
        "benchmarks.zero", args.only, ranks=args.ranks, rounds=args.rounds, arguments=[str(args.steps), str(args.stage)]
    )
    table(
        f"Step time, ZeRO-{args.stage}, {args.ranks} CPU ranks, median of {len(rounds)} paired rounds",
        ["contender", "wall s", "to bare", "range", "CPU s", "to bare"],
        [row(name, CONTENDERS[name], rounds, BASELINES) for name in args.only],
    )


def worker(name: str, steps: int, stage: Any) -> None:
    """Run one contender in this rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = {"bare": _bare, "ours": _ours, "lightning": _lightning}
    clock = run[name](steps, stage)
    clock.report()
    # No rank leaves while another one still waits for it.
    dist.barrier()
    dist.destroy_process_group()


def _config(stage: Any) -> dict[str, Any]:
    """The shipped template of the stage with sizes filled in: what ``ZeROStrategy`` gives DeepSpeed."""
    import torch.distributed as dist

    from lightning_swift.strategies._zero_config import TrainerFacts, base_config, complete_config, size_buckets
    from lightning_swift.strategies._zero_options import ZeROOptions

    options = ZeROOptions(stage=stage)
    config = complete_config(base_config(options), options, TrainerFacts(world_size=dist.get_world_size()))
    size_buckets(config, WORKLOAD.hidden)
    return config


def _data(steps: int) -> Any:
    import torch.distributed as dist

    return loader(WORKLOAD, steps + WARM_UP, rank=dist.get_rank(), world_size=dist.get_world_size())


def _adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _bare(steps: int, stage: Any) -> Clock:
    import deepspeed

    from lightning_swift.parallel.memory import return_freed_memory

    if stage == 3:
        # As ZeROStrategy does on CPU ranks, where partitioned parameters would save no memory otherwise.
        return_freed_memory()
    deepspeed.init_distributed("gloo")
    model = WORKLOAD.model()
    arguments = Namespace(device_rank=int(os.environ["LOCAL_RANK"]))
    engine = deepspeed.initialize(
        args=arguments, model=model, optimizer=_adamw(model.parameters()), config=_config(stage)
    )[0]
    clock = Clock()
    for batch in _data(steps):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        clock.tick()
    return clock


class _FusedModule(Module):
    def configure_optimizers(self) -> Any:
        return _adamw(self.parameters())


def _fit(steps: int, strategy: Any, *, precision: Any = None) -> Clock:
    clock = Clock()
    fit(_FusedModule(WORKLOAD), _data(steps), strategy, tick=clock.tick, precision=precision)
    return clock


def _ours(steps: int, stage: Any) -> Clock:
    from lightning_swift import ZeROStrategy

    return _fit(steps, ZeROStrategy(stage))


def _lightning(steps: int, stage: Any) -> Clock:
    from lightning_swift.parallel.memory import return_freed_memory

    if stage == 3:
        return_freed_memory()
    config = _config(stage)
    # The Trainer's own arguments, which Lightning writes into the configuration itself.
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        del config[key]
    return _fit(steps, _on_cpu(config), precision="bf16-mixed")


def _on_cpu(config: dict[str, Any]) -> Any:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnCPU(DeepSpeedStrategy):
        """Without the checks that refuse CPU devices, which have no index."""

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            import deepspeed

            return deepspeed.initialize(
                args=Namespace(device_rank=self.local_rank),
                config=self.config,
                model=model,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                dist_init_required=False,
            )[:2]

    return OnCPU(config=config, process_group_backend="gloo")


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) if "LOCAL_RANK" in os.environ else main()
