#!/bin/bash
#SBATCH --job-name=forebay
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# A run whose ranks torchrun starts, one for each GPU: sbatch deploy/torchrun_slurm.sh recipes/eight_gpus/7b.toml [KEY=VALUE ...]
# On two machines: sbatch --nodes=2 deploy/torchrun_slurm.sh RUN.toml train.ranks=16
# Submit it in a folder that all machines see, with the environment of Forebay active. A job that was ended goes on with
#     sbatch deploy/torchrun_slurm.sh --resume runs/NAME
# and by itself, once it is so, with torchrun's --max-restarts or sbatch's --requeue.
set -euo pipefail
test $# -gt 0 || { echo "usage: sbatch deploy/torchrun_slurm.sh RUN.toml [KEY=VALUE ...]" >&2; exit 2; }

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun does not read it from the job since SLURM 22.05.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --rdzv-backend=c10d \
    --rdzv-endpoint="$head:29400" --rdzv-id="$SLURM_JOB_ID" -m forebay train "$@"
