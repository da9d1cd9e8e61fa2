#!/usr/bin/env bash
# Two machines of eight GPUs under SLURM: sbatch configs/slurm/sft_hsdp.sh
#SBATCH --job-name=sft_hsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.out
set -euo pipefail

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# One task a GPU; Lightning reads ranks and addresses from SLURM. A job that SLURM has requeued (after a failed machine,
# or preempted) goes on from the newest whole checkpoint.
srun --kill-on-bad-exit=1 lightning-swift fit --config sft_hsdp \
  --trainer.devices "${SLURM_NTASKS_PER_NODE:-8}" --trainer.num_nodes "${SLURM_NNODES:-2}" --ckpt_path newest "$@"
