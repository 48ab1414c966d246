#!/bin/bash
# sbatch recipes/launch/slurm.sh RECIPE /shared/runs/a [more words of `blockdiff train`]
#SBATCH --job-name=blockdiff
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=TERM@600
#SBATCH --requeue

# One launcher per node, which starts a process per GPU. Ten minutes before the time is over Slurm sends SIGTERM to all
# of them: they save after the same optimiser step and end. The job, put back into the queue, goes on from there.
set -euo pipefail
recipe=$1 output=$2
shift 2
gpus=${GPUS_PER_NODE:-$SLURM_GPUS_ON_NODE}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / gpus))}

# --machine_rank is the node's own, so it is read there.
srun --kill-on-bad-exit=0 bash -c 'exec accelerate launch "$@" --machine_rank "$SLURM_NODEID" "${train[@]}"' launch \
