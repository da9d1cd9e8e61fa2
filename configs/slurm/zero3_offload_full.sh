#!/usr/bin/env bash
# One machine under SLURM with host memory for the offloaded state: sbatch configs/slurm/zero3_offload_full.sh
#SBATCH --job-name=zero3_offload
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=16
# 18 bytes a parameter: this is enough for 7 billion.
#SBATCH --mem=160G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.out
set -euo pipefail

# The optimizer runs on these cores.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 lightning-swift fit --config zero3_offload_full \
  --trainer.devices "${SLURM_NTASKS_PER_NODE:-2}" --ckpt_path newest "$@"
