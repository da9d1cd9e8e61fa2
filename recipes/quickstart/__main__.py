"""``make quickstart`` and ``make quickstart-full``: every step of a job, each as the command a user would type."""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from recipes.quickstart.assets import NOTICE, prepare_model, prepare_text

MODEL = Path("models/SmolLM2-135M-Instruct")
TEXT = Path("data/quickstart")
DOWNLOADS = Path("models/.downloads")
PROMPT = "What is a microprocessor?"


@dataclass(frozen=True)
class Job:
    """One of the quickstarts.

    Args:
        recipe: Its recipe; what it writes is in ``runs/`` under the same name.
        training: What is done, in a few words.
        adapter: Whether adapters are trained, so that a whole model has to be made of them.
    """

    recipe: str
    training: str
    adapter: bool = False

    @property
    def run(self) -> Path:
        """The folder of everything that this job writes."""
        return Path("runs") / self.recipe


JOBS = {
    "full": Job("quickstart", "FSDP2, BF16 compute, FP32 master weights"),
    "qlora": Job("quickstart_qlora", "LoRA adapters on 4-bit weights, ZeRO", adapter=True),
}


def main(job: Job) -> int:
    """Run a quickstart from the top folder of the repository; 0 on success."""
    start = time.monotonic()
    # This run's own outputs only: models and data are kept.
    shutil.rmtree(job.run, ignore_errors=True)
    say("1/6  Model and text")
    prepare_model(MODEL, downloads=DOWNLOADS)
    train, held_out = prepare_text(TEXT, downloads=DOWNLOADS)
    print(f"{NOTICE}\n{MODEL}: the model.\n{TEXT}: {train} chats to train on, {held_out} held out.")
    recipe = f"recipes/{job.recipe}.yaml"
    devices = ["--trainer.devices", "1"] if has_gpu() else []
    say("2/6  Held-out loss before training")
    swift("validate", "--config", recipe, "--trainer.logger.init_args.name", "before", *devices)
    say(f"3/6  Training: {job.training}")
    swift("fit", "--config", recipe, *devices)
    checkpoint = max(job.run.glob("checkpoints/*.ckpt"), key=lambda path: int(path.stem.rpartition("-")[2]))
    say("4/6  Merging the checkpoint into one folder")
    swift("merge", checkpoint, job.run / "merged", "--dtype", "bfloat16")
    say("5/6  Checking the merged folder's logits against those of the verified export")
    if job.adapter:
        # What the training has exported, verified, is the adapter; of this export too the logits are verified.
        swift("export", checkpoint, job.run / "exported", "--dtype", "bfloat16")
    gap = largest_logit_gap(job.run / "merged", job.run / "exported")
    print(f"largest difference of a logit: {gap:g}")
    say("6/6  A generated sentence")
    answer = swift("generate", job.run / "merged", "--prompt", PROMPT, "--max-new-tokens", "40")
    before, after = (
        last_value(job.run / "logs" / name / "version_0" / "metrics.csv", "val_loss") for name in ("before", "fit")
    )
    print(f"\n{'-' * 80}\nHeld-out loss:   {before:.3f} before, {after:.3f} after")
    print(f"Logits:          largest difference {gap:g} between merged and exported model")
    if job.adapter:
        print(f"Adapter:         {job.run / 'adapter'}")
    print(f"Model folder:    {job.run / 'merged'}\nPrompt:          {PROMPT}\nAnswer:          {answer}")
    print(f"Time:            {(time.monotonic() - start) / 60:.1f} minutes")
    return 0 if after < before and gap == 0 else 1


def say(step: str) -> None:
    """Print the heading of a step."""
    print(f"\n=== {step}", flush=True)


def swift(*arguments: object) -> str:
    """Run a ``lightning-swift`` command, showing it and what it prints.

    Returns:
        What it wrote to standard output.
    """
    words = [str(argument) for argument in arguments]
    print(f"$ lightning-swift {subprocess.list2cmdline(words)}", flush=True)
    command = [sys.executable, "-m", "lightning_swift", *words]
    if words[0] != "generate":
        subprocess.run(command, check=True)
        return ""
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    print(answer, flush=True)
    return answer


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU here; the recipe's processes then become one."""
    import torch

    return torch.cuda.is_available()


def last_value(log: Path, metric: str) -> float:
    """The last value of ``metric`` in a file of Lightning's CSVLogger."""
    with log.open(newline="", encoding="utf-8") as rows:
        return [float(row[metric]) for row in csv.DictReader(rows) if row.get(metric)][-1]


def largest_logit_gap(one: Path, other: Path) -> float:
    """Largest difference between the logits that two model folders give for the prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(one)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        first, second = (AutoModelForCausalLM.from_pretrained(f, dtype="auto")(**ids).logits for f in (one, other))
    return float((first.float() - second.float()).abs().max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m recipes.quickstart")
    parser.add_argument("job", nargs="?", choices=list(JOBS), default="qlora")
    chosen = JOBS[parser.parse_args().job]
    # Progress bars of conversions would drown what the steps say.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(main(chosen))
    except subprocess.CalledProcessError as failure:
        sys.exit(f"quickstart: `{subprocess.list2cmdline(failure.cmd)}` failed with exit code {failure.returncode}")
