"""A script that runs slime, in the manner of its examples."""

from pathlib import Path

MODEL = """MODEL_ARGS=(
   --disable-bias-linear --swiglu --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
   --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --normalization RMSNorm
   --norm-epsilon 1e-6 --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}" --num-experts 128 --moe-router-topk 8
   --moe-layer-freq [1]*94 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0
)
"""
RUN = """#!/bin/bash
# for rerun the task
pkill -9 sglang
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/moe.sh"
CKPT_ARGS=(
   --hf-checkpoint $BASE/model
   --ref-load $BASE/model_torch_dist
   --save $BASE/out
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data $BASE/train.parquet
   --input-key prompt --apply-chat-template --rollout-shuffle --rm-type deepscaler
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --global-batch-size 64
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)
EVAL_ARGS=(--eval-interval 10 --eval-prompt-data aime $BASE/aime.jsonl --n-samples-per-eval-prompt 16)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --context-parallel-size 2
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coef 0.00
   --eps-clip 0.2 --eps-clip-high 0.28 --use-tis
)
OPTIMIZER_ARGS=(--optimizer adam --lr 2e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98
   --tp-comm-overlap)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 $(seq 4 8 256)
   --sglang-ep-size 8)
MISC_ARGS=(--attention-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{}" -- python3 train.py \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${PERF_ARGS[@]} ${GRPO_ARGS[@]} \\
   ${OPTIMIZER_ARGS[@]} ${SGLANG_ARGS[@]} ${MISC_ARGS[@]}
"""


def script(folder: Path, before: str = "", after: str = "") -> Path:
    assert before in RUN
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "moe.sh").write_text(MODEL)
    (folder / "run.sh").write_text(RUN.replace(before, after) if before else RUN)
    return folder / "run.sh"
