#!/usr/bin/env bash
# One machine under torchrun: configs/torchrun/one_machine.sh [RECIPE] [options of lightning-swift fit]
# One process a GPU. When one fails, torchrun ends the others and starts all again, from the newest checkpoint.
set -euo pipefail

RECIPE="${1:-sft_fsdp}"
GPUS="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
RESTARTS="${RESTARTS:-3}"

exec torchrun --standalone --nproc-per-node "$GPUS" --max-restarts "$RESTARTS" \
  -m lightning_swift fit --config "$RECIPE" --trainer.devices "$GPUS" --ckpt_path newest "${@:2}"
