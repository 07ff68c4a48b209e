#!/usr/bin/env bash
#
# Evaluates a HuggingFace folder: starts a Ray cluster over the nodes of this allocation, then runs `megarl eval` on it.
#
#   sbatch slurm/eval.sh --model /runs/grpo/huggingface --files /data/eval.parquet --reward gsm8k \
#     --output-dir /runs/eval rollout.engine_args.tensor_parallel_size=8
#
# All arguments are passed to `megarl eval`. Paths must be absolute and on a file system that all nodes share.

#SBATCH --job-name=megarl-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
[[ -f slurm/cluster.sh ]] || { echo "eval.sh: $PWD is no checkout, it has no slurm/cluster.sh: submit from the checkout" >&2; exit 2; }
source slurm/cluster.sh

run_on_cluster megarl eval "$@" cluster.address="$address"
exit "$status"
