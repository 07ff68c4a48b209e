"""`--megatron-args`: arguments of a Megatron-LM script as options here, others refused by name, the model compared."""

import json
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.cli.main import main
from megarl.config.folder import recipes_folder
from megarl.config.foreign.megatron_script import check_model, read_megatron_script

# The model of DeepSeek-V3 as scripts give it to Megatron-LM: the pattern of its layers is made in a loop.
DEEPSEEK_V3 = """
NLAYERS="${MODEL_ARGS_NUM_LAYERS:-61}"
DENSE=3
for ((i=0; i<NLAYERS; i++)); do if (( i < DENSE )); then arr+=(0); else arr+=(1); fi; done
printf -v PATTERN "[%s]" "$(IFS=', '; echo "${arr[*]}")"
MODEL_ARGS=(
    --disable-bias-linear --swiglu --untie-embeddings-and-output-weights
    --num-layers $NLAYERS --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128  # which latent attention does not read
    --normalization RMSNorm --norm-epsilon 1e-6 --vocab-size 129280
    --position-embedding-type rope --no-rope-fusion --rotary-base 10000 --rotary-scaling-factor 40
    --mscale 1.0 --mscale-all-dim 1.0

    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --attention-softmax-in-fp32

    # experts
    --num-experts 256 --moe-layer-freq "$PATTERN" --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048 --moe-router-pre-softmax --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
    --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-4 --moe-router-bias-update-rate 0
    --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-grouped-gemm --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32 --moe-permute-fusion
)
"""
# A whole job in the manner of Megatron-LM's examples.
JOB = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
NNODES=${SLURM_NNODES:-"4"}
LAYERS=32
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes $NNODES --master_addr ${MASTER_ADDR:-localhost})
MODEL_ARGS=(--num-layers $LAYERS --hidden-size 4096 --group-query-attention --seq-length 4096)
TRAINING_ARGS=(
    --global-batch-size 256   # sequences
    --lr 1e-5 --min-lr 1.0e-6 --lr-decay-style cosine --lr-warmup-iters 500 --lr-decay-iters $((100 * 1000))
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --no-masked-softmax-fusion --recompute-activations
)
MODEL_PARALLEL_ARGS="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\
    --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel"
LOGGING_ARGS=(--log-interval 1 --save "$CHECKPOINT_PATH" --tensorboard-dir "$CHECKPOINT_PATH/tb" --no-load-optim)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(--wandb-project mixtral)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} $MODEL_PARALLEL_ARGS ${LOGGING_ARGS[@]}
"""
YAML = """
language_model:
  num_layers: 61
  hidden_size: 7168
model_parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: true
recompute_modules: [mla_up_proj, moe]
lr: 1.0e-5
masked_softmax_fusion: false
wandb_project: ''
save: null
"""


def write(folder: Path, text: str, name: str = "script.sh") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def deepseek(tmp_path: Path) -> str:
    write(tmp_path, (recipes_folder() / "models" / "deepseek_v3.json").read_text(), "config.json")
    return str(tmp_path)


def options(file: Path) -> dict[str, str]:
    script = read_megatron_script(file, {})
    return dict(each.text.split("=", 1) for each in script.assignments)


def test_the_job_of_a_script_becomes_options(tmp_path: Path) -> None:
    file = write(tmp_path, JOB)
    assert options(file) == {
        "megatron.lr": "1e-5",
        "megatron.min_lr": "1.0e-6",
        "megatron.lr_decay_style": "cosine",
        "megatron.lr_warmup_steps": "500",
        "megatron.lr_decay_steps": "100000",
        "megatron.weight_decay": "0.1",
        "megatron.clip_grad": "1.0",
        "model.dtype": "bf16",
        "megatron.masked_softmax_fusion": "false",
        "megatron.recompute_granularity": "selective",
        "megatron.tensor_model_parallel_size": "2",
        "megatron.pipeline_model_parallel_size": "4",
        "megatron.virtual_pipeline_model_parallel_size": "4",
    }
    script = read_megatron_script(file, {})
    assert [argument.flag for argument in script.model] == ["--num-layers", "--hidden-size"]
    assert sorted(flag for flags in script.left_out.values() for flag in flags) == [
        *("--global-batch-size", "--group-query-attention", "--log-interval", "--no-load-optim", "--save"),
        *("--seq-length", "--sequence-parallel", "--tensorboard-dir"),
    ]
    assert script.uncertain == {
        "it stands in a branch or a loop of the script": [f"{script.model[0].where.rpartition(':')[0]}:17"]
    }
    assert script.assignments[0].origin == f"{file}:10 --lr"


def test_yaml_is_read_alike(tmp_path: Path) -> None:
    file = write(tmp_path, YAML, "args.yaml")
    assert options(file) == {
        "megatron.tensor_model_parallel_size": "2",
        "megatron.recompute_modules": "[mla_up_proj,moe]",
        "megatron.lr": "1e-05",
        "megatron.masked_softmax_fusion": "false",
    }


def test_the_array_of_a_model_is_that_model(tmp_path: Path, deepseek: str) -> None:
    script = read_megatron_script(write(tmp_path, DEEPSEEK_V3), {})
    check_model(script.model, deepseek)
    assert len(script.model) == 34
    assert options(write(tmp_path, DEEPSEEK_V3))["megatron.moe_aux_loss_coeff"] == "1e-4"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("--hidden-size 7168", "--hidden-size 4096", r"--hidden-size says 4096, and config\.json in .* says 7168"),
        ("--swiglu", "--no-swiglu", "--no-swiglu says no, and config.json in .* says yes"),
        ("--untie-emb", "--no-untie-emb", "says yes, and config.json in .* says no"),
        ("--norm-epsilon 1e-6", "--norm-epsilon 1e-5", "says 1e-05, and config.json in .* says 1e-06"),
        ("--q-lora-rank 1536", "--q-lora-rank 768", "--q-lora-rank says 768"),
        ('"$PATTERN"', "[0]*5+[1]*56", "says experts in 56 of 61 layers, and config.json .* says experts in 58 of 61"),
        ("--moe-router-topk 8", "--moe-router-topk 6", "--moe-router-topk says 6"),
        ("score-function sigmoid", "score-function softmax", "says softmax, and config.json in .* says sigmoid"),
    ],
)
def test_another_model_is_refused_with_both_values(
    tmp_path: Path, deepseek: str, before: str, after: str, says: str
) -> None:
    assert before in DEEPSEEK_V3
    script = read_megatron_script(write(tmp_path, DEEPSEEK_V3.replace(before, after)), {})
    with pytest.raises(UserError, match=says):
        check_model(script.model, deepseek)


def test_patterns_of_layers_are_compared_layer_by_layer(tmp_path: Path, deepseek: str) -> None:
    pattern = "[0]*3+[1]*58"
    check_model(read_megatron_script(write(tmp_path, f"A=(--moe-layer-freq {pattern})"), {}).model, deepseek)
    with pytest.raises(UserError, match="neither a number nor a list like"):
        check_model(read_megatron_script(write(tmp_path, "A=(--moe-layer-freq len)"), {}).model, deepseek)


def test_samples_become_steps_of_the_batch(tmp_path: Path) -> None:
    decay = "--lr-warmup-samples 0 --lr-decay-samples 1000 --global-batch-size 64 --lr-wsd-decay-samples 640"
    assert options(write(tmp_path, f"A=({decay})")) == {
        "megatron.lr_warmup_steps": "0",
        "megatron.lr_decay_steps": "16",
        "megatron.lr_wsd_decay_steps": "10",
    }
    assert options(write(tmp_path, "A=(--lr-warmup-samples 0)")) == {"megatron.lr_warmup_steps": "0"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "A=(--tensor-model-paralel-size 2)",
            r":1: --tensor-model-paralel-size is known neither .*did you mean --tens",
        ),
        ("A=(--lr 1 --fp16)", "--fp16 cannot be taken over: training is in bf16 or fp32"),
        ("A=(\n--lr $RATE\n)", r":2: \$RATE has no value that can be read"),
        ("A=(--lr-warmup-samples 9)", "--lr-warmup-samples 9 needs a --global-batch-size .* give --lr-warmup-iters"),
        ("A=(--lr-decay-samples 9 --global-batch-size 2 --rampup-batch-size 1 1 9)", "for the whole run"),
        ("A=(--num-layers-per-virtual-pipeline-stage 2)", "needs --num-layers and --pipeline-model-parallel-size"),
        ("python a.py x --lr 1", "'x' belongs to no argument"),
        ("A=(--lr-warmup-samples)", "--lr-warmup-samples needs one whole number, and has none"),
        ("A=(--lr-warmup-samples 5e2 --global-batch-size 2)", "needs one whole number, and has 5e2"),
        ("A=(--lr-warmup-samples 5 --global-batch-size)", "--global-batch-size needs one whole number"),
        ("A=(--lr)", "--lr needs a value"),
        ("echo hello", "has no arguments"),
    ],
)
def test_what_cannot_be_taken_over_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_megatron_script(write(tmp_path, text), {})


def test_the_command_takes_a_script_and_says_where_values_come_from(
    tmp_path: Path, deepseek: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, JOB.replace("--num-layers $LAYERS --hidden-size 4096", "--hidden-size 7168"))
    file.write_text(file.read_text().replace("--num-layers-per-virtual-pipeline-stage 2", ""))
    words = ["config", "--config-name", "grpo_qwen3_moe", "--megatron-args", str(file), f"model.path={deepseek}"]
    assert main([*words, "--json", "megatron.clip_grad=0.5", "--pipeline-model-parallel-size", "2"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["configuration"]
    assert found["megatron.lr"] == {"value": 1e-5, "origin": f"{file}:10 --lr"}
    assert found["megatron.clip_grad"] == {"value": 0.5, "origin": "override"}
    assert found["megatron.pipeline_model_parallel_size"]["origin"] == "flag --pipeline-model-parallel-size"
    assert "left out, since the recipe says the batches" in said.err
    assert f"branch or a loop of the script: {file}:17" in said.err
    file.write_text("A=(--hidden-size 64)")
    assert main(["train", *words[1:], "output_dir=o"]) == 2
    assert f"megarl: {file}:1: --hidden-size says 64, and config.json in" in capsys.readouterr().err
