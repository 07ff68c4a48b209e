#!/usr/bin/env bash
#
# Checks whether the nodes of this allocation are sound: `megarl doctor --cluster` on a Ray cluster over them.
#
#   sbatch --nodes=32 slurm/preflight.sh --folders /runs --inputs /models /data
#
# All arguments are passed to `megarl doctor`. Exits with 1 and names the node if one is slow or broken;
# `sbatch --dependency=afterok:JOBID slurm/grpo_deepseek.sh ...` starts a run only if all are sound.

#SBATCH --job-name=megarl-preflight
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log

set -euo pipefail
[[ -f slurm/cluster.sh ]] || { echo "preflight.sh: $PWD is no checkout, it has no slurm/cluster.sh: submit from the checkout" >&2; exit 2; }
source slurm/cluster.sh

run_on_cluster megarl doctor --cluster "$address" "$@"
exit "$status"
