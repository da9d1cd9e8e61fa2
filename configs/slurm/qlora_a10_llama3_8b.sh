#!/usr/bin/env bash
# QLoRA of an 8B model on one 24 GB card under SLURM: sbatch configs/slurm/qlora_a10_llama3_8b.sh
#SBATCH --job-name=qlora
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=48G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.out
set -euo pipefail

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 lightning-swift fit --config qlora_a10_llama3_8b --ckpt_path newest "$@"
