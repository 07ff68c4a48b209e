#!/usr/bin/env bash
#
# GRPO with the recipe grpo_deepseek_v3: a Ray cluster over the nodes of this allocation, then `megarl train` on it.
#
# Submit from the checkout, which lies on a file system that all nodes see, with .venv made by `make setup CUDA=1`:
#
#   sbatch slurm/grpo_deepseek.sh model.path=/models/policy 'data.train_files=[/data/math.parquet]' output_dir=/runs/grpo
#
# Every argument goes to `megarl train`: KEY=VALUE, or a flag of Megatron. Paths must be absolute and on that file
# system. A job that is requeued continues from the last checkpoint below output_dir. 15 minutes before its time is over
# (--signal; longer than the longest step takes) the run is told to write one, and the job goes back into the queue.
#
# The sizes of grpo_deepseek_v3 need many nodes (--nodes), and each of its engines 16 GPUs of one node, or of two with
# rollout.engine_args.nnodes=2. On the one node asked for below, give sizes that fit it, for example for a small model of
# this architecture on 8 GPUs:
#
#   cluster.trainer_ranks=4 megatron.tensor_model_parallel_size=2 megatron.pipeline_model_parallel_size=1
#   megatron.num_layers_in_first_pipeline_stage=null megatron.num_layers_in_last_pipeline_stage=null
#   megatron.expert_model_parallel_size=4 rollout.replicas=1 rollout.engine_args.tensor_parallel_size=4
#
# See "Several machines" and "GPUs" in docs/operations.md. This script has not been run on GPUs.
#
# From the environment: HEAD_IP, this node's address for the others (default: what its host name resolves to);
# RAY_PORT (default 6379); START_TIMEOUT_S, how long the nodes may take to join (default 300).

#SBATCH --job-name=megarl-grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

fail() {
  echo "grpo_deepseek.sh: $*" >&2
  exit 1
}

[[ -n "${SLURM_JOB_ID:-}" ]] || fail "run it with sbatch"
[[ -x .venv/bin/megarl ]] || fail "no .venv in $PWD: run make setup CUDA=1 there and submit from there"
export PATH="$PWD/.venv/bin:$PATH"

port="${RAY_PORT:-6379}"
head_ip="${HEAD_IP:-$(hostname --ip-address | tr ' ' '\n' | grep --max-count=1 --extended-regexp '^[0-9.]+$')}"
[[ "$head_ip" != 127.* ]] || fail "the name of this node resolves to $head_ip: give HEAD_IP, its address for the others"
address="$head_ip:$port"

steps=()
stop_ray() {
  kill "${steps[@]}" 2>/dev/null || true
  wait
}
trap stop_ray EXIT

# A step has one core unless it asks for more, and Ray and all workers run inside it.
start_ray() {
  local nodes="$1"
  shift
  srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" "$@" &
  steps+=("$!")
}

nodes_up() {
  python - "$address" 2>/dev/null <<'PYTHON' || echo 0
import sys

import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
PYTHON
}

wait_for_nodes() {
  local wanted="$1" deadline=$((SECONDS + ${START_TIMEOUT_S:-300}))
  until (($(nodes_up) >= wanted)); do
    ((SECONDS < deadline)) || fail "only $(nodes_up) of $wanted nodes joined the Ray cluster at $address"
    sleep 2
  done
}

# The batch script runs on the first node of the allocation: the head, and the controller of the run.
start_ray 1 --nodelist="$SLURMD_NODENAME" \
  ray start --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false --disable-usage-stats --block
wait_for_nodes 1
if ((SLURM_JOB_NUM_NODES > 1)); then
  start_ray "$((SLURM_JOB_NUM_NODES - 1))" --exclude="$SLURMD_NODENAME" \
    ray start --address="$address" --disable-usage-stats --block
  wait_for_nodes "$SLURM_JOB_NUM_NODES"
fi

megarl train --config-name grpo_deepseek_v3 cluster.address="$address" checkpoint.on_signal=true "$@" &
run="$!"
time_is_over=false
trap 'time_is_over=true; kill -TERM "$run"' USR1
status=0
# `wait` comes back for the signal, too: the run then still finishes its step.
while kill -0 "$run" 2>/dev/null; do
  wait "$run" && status=0 || status="$?"
done
if "$time_is_over" && ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
