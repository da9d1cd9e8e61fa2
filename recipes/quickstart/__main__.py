"""``make quickstart``: every step of the main job, each as the command that a user would type."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from recipes.quickstart.assets import NOTICE, prepare_model, prepare_text

MODEL = Path("models/SmolLM2-135M-Instruct")
TEXT = Path("data/quickstart")
DOWNLOADS = Path("models/.downloads")
RUN = Path("runs/quickstart")
RECIPE = "recipes/quickstart.yaml"
PROMPT = "What is a microprocessor?"


def main() -> int:
    """Run the quickstart from the top folder of the repository; 0 on success."""
    start = time.monotonic()
    # This run's own outputs only: models and data are kept.
    shutil.rmtree(RUN, ignore_errors=True)
    say("1/6  Model and text")
    prepare_model(MODEL, downloads=DOWNLOADS)
    train, held_out = prepare_text(TEXT, downloads=DOWNLOADS)
    print(f"{NOTICE}\n{MODEL}: the model.\n{TEXT}: {train} chats to train on, {held_out} held out.")
    devices = ["--trainer.devices", "1"] if has_gpu() else []
    say("2/6  Held-out loss before training")
    swift("validate", "--config", RECIPE, "--trainer.logger.init_args.name", "before", *devices)
    say("3/6  Training: FSDP2, BF16 compute, FP32 master weights")
    swift("fit", "--config", RECIPE, *devices)
    checkpoint = max(RUN.glob("checkpoints/*.ckpt"), key=lambda path: int(path.stem.rpartition("-")[2]))
    say("4/6  Merging the sharded checkpoint")
    swift("merge", checkpoint, RUN / "merged", "--dtype", "bfloat16")
    say("5/6  Checking the merged folder's logits against those of the verified export")
    gap = largest_logit_gap(RUN / "merged", RUN / "exported")
    print(f"largest difference of a logit: {gap:g}")
    say("6/6  A generated sentence")
    answer = swift("generate", RUN / "merged", "--prompt", PROMPT, "--max-new-tokens", "40")
    before, after = (
        last_value(RUN / "logs" / name / "version_0" / "metrics.csv", "val_loss") for name in ("before", "fit")
    )
    print(f"\n{'-' * 80}\nHeld-out loss:   {before:.3f} before, {after:.3f} after")
    print(f"Logits:          largest difference {gap:g} between merged and exported model")
    print(f"Model folder:    {RUN / 'merged'}\nPrompt:          {PROMPT}\nAnswer:          {answer}")
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
    """Whether PyTorch sees a GPU here; the recipe's two processes then become one."""
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
    # Progress bars of conversions would drown what the steps say.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failure:
        sys.exit(f"quickstart: `{subprocess.list2cmdline(failure.cmd)}` failed with exit code {failure.returncode}")
