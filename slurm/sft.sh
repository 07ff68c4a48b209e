#!/usr/bin/env bash
#
# Supervised fine-tuning: starts a Ray cluster over the nodes of this allocation, then runs `megarl sft` on it.
#
#   sbatch --nodes=2 slurm/sft.sh --config-name sft_qwen3_moe model.path=/models/policy \
#     'sft.train_files=[/data/chats.parquet]' sft.steps=2000 output_dir=/runs/sft
#
# The recipe is for Qwen3-30B-A3B on two nodes of 8 GPUs; another model needs its own name, sizes and cluster.trainer_ranks.
#
# All arguments are passed to `megarl sft`; paths, time limit and requeueing are as in slurm/grpo_deepseek.sh.

#SBATCH --job-name=megarl-sft
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
[[ -f slurm/cluster.sh ]] || { echo "sft.sh: $PWD is no checkout, it has no slurm/cluster.sh: submit from the checkout" >&2; exit 2; }
source slurm/cluster.sh

run_on_cluster megarl sft cluster.address="$address" checkpoint.on_signal=true cluster.max_restarts=0 "$@"
requeue_if_unfinished
exit "$status"
