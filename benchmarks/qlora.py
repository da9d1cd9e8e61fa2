"""Step time of QLoRA in one process: ``ZeRO3QLoRAStrategy`` beside a plain loop and the Hugging Face Trainer.

All have the same folder, adapters of peft, 4-bit storage of bitsandbytes, batches and optimizer.
``python -m benchmarks.qlora``
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.launch import table, torchrun
from benchmarks.paired import WARM_UP, Clock, row, take_turns
from benchmarks.workload import RandomTokens, Workload, fit, loader

WORKLOAD = Workload(hidden=512, layers=6, vocab=8192, batch=2, length=256)
RANK, ALPHA, RATE = 16, 32, 1e-4
CONTENDERS = {
    "plain": "hand-written loop, peft + bitsandbytes",
    "ours": "Trainer + ZeRO3QLoRAStrategy",
    "ddp": "Trainer + DDPBF16Strategy(lora, nf4)",
    "huggingface": "Hugging Face Trainer, peft + bitsandbytes",
}
BASELINES = dict.fromkeys(CONTENDERS, "plain")


def main() -> None:
    """Write the model folder, launch the workers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as folder:
        import torch

        WORKLOAD.model().to(torch.bfloat16).save_pretrained(folder)
        # The first run of all builds DeepSpeed's kernels, which takes minutes and is no step time.
        torchrun("benchmarks.qlora", 1, ["ours", "1", folder])
        rounds = take_turns(
            "benchmarks.qlora", args.only, ranks=1, rounds=args.rounds, arguments=[str(args.steps), folder]
        )
    table(
        f"Step time, QLoRA (NF4, r={RANK}), one CPU process, median of {len(rounds)} paired rounds",
        ["contender", "wall s", "to plain", "range", "CPU s", "to plain"],
        [row(name, CONTENDERS[name], rounds, BASELINES) for name in args.only],
    )


def worker(name: str, steps: int, folder: str) -> None:
    """Run one contender in this process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    torch.set_num_threads(1)
    run = {"plain": _plain, "ours": _ours, "ddp": _ddp, "huggingface": _huggingface}
    run[name](steps, folder).report()


def _quantised(folder: str) -> Any:
    """The model as the documentation of peft has it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=four_bits)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, settings).train()


def _adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=RATE, fused=True)


def _plain(steps: int, folder: str) -> Clock:
    import torch

    model = _quantised(folder)
    optimizer = _adamw(model.parameters())
    clock = Clock()
    for batch in loader(WORKLOAD, steps + WARM_UP, rank=0, world_size=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick()
    return clock


def _fit(steps: int, folder: str, strategy: Any) -> Clock:
    import lightning as L

    from lightning_swift import lazy_pretrained

    clock = Clock()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = lazy_pretrained(folder).train()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return _adamw(self.parameters())

    fit(Module(), loader(WORKLOAD, steps + WARM_UP, rank=0, world_size=1), strategy, tick=clock.tick)
    return clock


def _ours(steps: int, folder: str) -> Clock:
    from lightning_swift import LoraSettings, ZeRO3QLoRAStrategy

    return _fit(steps, folder, ZeRO3QLoRAStrategy(LoraSettings(r=RANK, alpha=ALPHA)))


def _ddp(steps: int, folder: str) -> Clock:
    from lightning_swift import DDPBF16Strategy, LoraSettings

    lora = LoraSettings(r=RANK, alpha=ALPHA)
    return _fit(steps, folder, DDPBF16Strategy(lora=lora, quantization="nf4"))


def _huggingface(steps: int, folder: str) -> Clock:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    settings = TrainingArguments(
        output_dir=str(Path(folder) / "huggingface"),
        per_device_train_batch_size=WORKLOAD.batch,
        max_steps=steps + WARM_UP,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = RandomTokens((steps + WARM_UP) * WORKLOAD.batch, WORKLOAD)
    Trainer(_quantised(folder), settings, train_dataset=data, callbacks=[Ticks()]).train()
    return clock


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), sys.argv[3]) if "LOCAL_RANK" in os.environ else main()
