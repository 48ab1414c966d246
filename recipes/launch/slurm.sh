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

# One launcher per node starts a process per GPU. Ten minutes before the time is over Slurm sends SIGTERM to all of them:
# they save after the same optimiser step and end. Submitted again (or put back into the queue), the job goes on there.
set -euo pipefail
recipe=$1 output=$2
shift 2
config=${CONFIG:-recipes/launch/several_nodes.yaml}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
gpus=${SLURM_GPUS_ON_NODE:-8}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / gpus))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540 # seconds that launchers wait for the last checkpoint; their own default is 30

# SLURM_NODEID is read in the shell that srun starts on each node.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file "$0" --machine_rank "$SLURM_NODEID" "$@"
' "$config" --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * gpus)) --main_process_ip "$first" \
    --main_process_port $((20000 + SLURM_JOB_ID % 20000)) \
    -m blockdiff train "$recipe" --output "$output" --resume "$@"
