#!/usr/bin/env bash
#
# Converts a HuggingFace folder to a Megatron checkpoint, on one node without GPUs: `megarl convert`.
#
#   sbatch slurm/convert.sh --hf /models/DeepSeek-V3 --tp 8 --pp 8 --ep 32 --out /models/DeepSeek-V3-megatron
#
# All arguments are passed to `megarl convert`. An interrupted job continues when the same command is submitted again.

#SBATCH --job-name=megarl-convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
[[ -f slurm/cluster.sh ]] || { echo "convert.sh: $PWD is no checkout, it has no slurm/cluster.sh: submit from the checkout" >&2; exit 2; }
source slurm/cluster.sh

run_alone megarl convert "$@"
exit "$status"
