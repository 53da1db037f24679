#!/bin/bash
#SBATCH --job-name=forebay
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# A run on Ray over the machines of a SLURM job: sbatch deploy/slurm.sh deploy/two_nodes.toml [KEY=VALUE ...]
# Submit it in a folder that all machines see, with the environment of Forebay active. A job that was ended goes on with
#     sbatch deploy/slurm.sh --resume runs/NAME
set -euo pipefail
test $# -gt 0 || { echo "usage: sbatch deploy/slurm.sh RUN.toml [KEY=VALUE ...]" >&2; exit 2; }

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS="$address:6379"
# This job's own: whoever reaches a Ray without one can have it run anything.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$(python3 -c 'import secrets; print(secrets.token_hex())')"
# srun does not read it from the job since SLURM 22.05.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# The first machine's task is the head, the others join it; --block ends with the job.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash -c '
    if [ "$SLURM_NODEID" = 0 ]; then
        exec ray start --block --disable-usage-stats --head --port=6379 --node-ip-address="${RAY_ADDRESS%:*}"
    fi
    until ray health-check --address "$RAY_ADDRESS" 2>/dev/null; do sleep 2; done
    exec ray start --block --disable-usage-stats --address="$RAY_ADDRESS"' &
ray=$!
trap 'kill "$ray" 2>/dev/null || true' EXIT

until ray health-check --address "$RAY_ADDRESS" 2>/dev/null; do
    kill -0 "$ray" || { echo "Ray did not start on $head" >&2; exit 1; }
    sleep 2
done
# On the head, from which a run waits for room: cluster.arguments.placement_timeout_s.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" forebay train "$@"
