#!/usr/bin/env bash
#
# GRPO with the recipe grpo_deepseek_v3: starts a Ray cluster over the nodes of this allocation, then runs `megarl train`.
#
# Submit it from the checkout, which must be on a file system that all nodes share, with .venv made by `make setup CUDA=1`:
#
#   sbatch --nodes=48 slurm/grpo_deepseek.sh model.path=/models/policy 'data.train_files=[/data/math.parquet]' output_dir=/runs/grpo
#
# The model is the released one in bf16, without its multi-token-prediction layer: see "A released model as a policy" in
# docs/convert.md. All arguments are passed to `megarl train`: KEY=VALUE, or Megatron's flags. Paths must be absolute and
# on that file system. A requeued job continues from the last checkpoint below output_dir. When the time left is too short
# for another step, or on preemption, the run saves a checkpoint and ends, and the job is requeued. It is also requeued
# when a process or a machine dies.
#
# The sizes of grpo_deepseek_v3 need 48 nodes of 8 GPUs, with each engine on 16 GPUs of two nodes. For the single node
# requested below, give sizes that fit it, for example for a small model of this architecture on 8 GPUs:
#
#   cluster.trainer_ranks=4 megatron.tensor_model_parallel_size=2 megatron.pipeline_model_parallel_size=1
#   megatron.num_layers_in_first_pipeline_stage=null megatron.num_layers_in_last_pipeline_stage=null
#   megatron.expert_model_parallel_size=4 rollout.replicas=1 rollout.engine_args.tensor_parallel_size=4
#   rollout.engine_args.nnodes=1 rollout.weights=as_trained
#
# See "Slurm", "Several machines" and "GPUs" in docs/cluster.md; slurm/cluster.sh lists the environment variables, such
# as a container image. This script has been tested on a Slurm cluster of two nodes, not on GPUs.

#SBATCH --job-name=megarl-grpo
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
[[ -f slurm/cluster.sh ]] || { echo "grpo_deepseek.sh: $PWD is no checkout, it has no slurm/cluster.sh: submit from the checkout" >&2; exit 2; }
source slurm/cluster.sh

run_on_cluster megarl train --config-name grpo_deepseek_v3 cluster.address="$address" checkpoint.on_signal=true cluster.max_restarts=0 "$@"
requeue_if_unfinished
exit "$status"
