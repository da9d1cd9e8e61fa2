#!/usr/bin/env bash
# Several machines under torchrun. Run it on each of them, with the same paths, and with the same HEAD:
#   MACHINES=2 HEAD=first-machine:29500 configs/torchrun/several_machines.sh sft_hsdp
set -euo pipefail

RECIPE="${1:-sft_hsdp}"
: "${MACHINES:?number of machines}"
: "${HEAD:?name and free port of one of them, such as node1:29500}"
GPUS="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"

exec torchrun --nnodes "$MACHINES" --nproc-per-node "$GPUS" --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${RUN:-lightning-swift}" \
  -m lightning_swift fit --config "$RECIPE" \
  --trainer.devices "$GPUS" --trainer.num_nodes "$MACHINES" --ckpt_path newest "${@:2}"
