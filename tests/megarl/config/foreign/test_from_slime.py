"""Scripts of slime become recipes that do the same; arguments without a counterpart are said."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from verl_scripts import said

from converters.errors import UserError
from megarl.algorithms.advantages import estimate
from megarl.algorithms.ragged import Ragged
from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.config.folder import recipes_folder
from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.recipe import TranslatedRecipe, check
from megarl.config.foreign.slime_flags import ADVANTAGES, WHITENED
from megarl.config.origins import compose_open, leaves
from megarl.rewards.terms import terms_of

MODEL = """MODEL_ARGS=(
   --disable-bias-linear --swiglu --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
   --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --normalization RMSNorm
   --norm-epsilon 1e-6 --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}" --num-experts 128 --moe-router-topk 8
   --moe-layer-freq [1]*94 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0
)
"""
FLAGS = (Path(__file__).parent / "slime_arguments.txt").read_text().split()
"""Arguments that slime itself has, of its present and of earlier versions."""
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


def values(recipe: TranslatedRecipe, *groups: str) -> dict[str, Any]:
    return {key: value for key, value in leaves(recipe.values) if key.startswith(groups)}


def test_a_script_becomes_a_recipe(tmp_path: Path) -> None:
    recipe = from_slime(script(tmp_path), {"BASE": "/b"})
    assert values(recipe, "algorithm.", "loop.", "megatron.", "rollout.", "data.", "cluster.", "output_dir") == {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "clip",
        "algorithm.policy_loss_options.clip_low": 0.2,
        "algorithm.policy_loss_options.clip_high": 0.28,
        # slime's mean over the tokens of each response, where nothing else is said.
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.corrections": [{"kind": "token_importance", "high": 2.0}],
        "algorithm.dynamic_sampling": True,
        "algorithm.kl_coefficient": 0.001,
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": "k3",
        "algorithm.updates_per_step": 4,
        "algorithm.entropy_coefficient": 0.0,
        "loop.max_tokens_per_micro_batch": 16384,
        "loop.steps": 300,
        "loop.prompts_per_step": 32,
        "loop.samples_per_prompt": 8,
        "loop.seed": 42,
        "loop.eval_every": 10,
        "loop.eval_samples": 16,
        # As slime has it where the evaluation has no temperature of its own.
        "loop.eval_temperature": 0.8,
        "megatron.tensor_model_parallel_size": 4,
        "megatron.pipeline_model_parallel_size": 2,
        "megatron.context_parallel_size": 2,
        "megatron.expert_model_parallel_size": 8,
        "megatron.expert_tensor_parallel_size": 1,
        "megatron.recompute_granularity": "full",
        "megatron.recompute_method": "uniform",
        "megatron.recompute_num_layers": 1,
        "megatron.optimizer": "adam",
        "megatron.lr": 2e-6,
        "megatron.lr_decay_style": "constant",
        "megatron.weight_decay": 0.1,
        "megatron.adam_beta2": 0.98,
        "megatron.grad_reduce_in_fp32": True,
        "megatron.moe_aux_loss_coeff": 0,
        "megatron.moe_grouped_gemm": True,
        "megatron.moe_token_dispatcher_type": "alltoall",
        "rollout.engine": "sglang",
        "rollout.engine_args.tp_size": 8,
        "rollout.engine_args.mem_fraction_static": 0.7,
        "rollout.engine_args.ep_size": 8,
        "rollout.replicas": 2,
        "rollout.max_response_tokens": 8192,
        "rollout.temperature": 0.8,
        "data.train_files": ["/b/train.parquet"],
        "data.eval_files": "???",
        "data.prompt_column": "prompt",
        "data.shuffle": True,
        "cluster.trainer_ranks": 16,
        "cluster.pools.all.roles": ["trainer", "engine"],
        "cluster.pools.all.nodes": 2,
        "cluster.pools.all.shared": True,
        "output_dir": "/b/out",
    }
    assert sorted(flag.split()[0] for flags in recipe.absent.values() for flag in flags) == [
        *("--eval-prompt-data", "--sglang-cuda-graph-bs", "--tp-comm-overlap"),
    ]
    assert "--ref-load /b/model_torch_dist" in [flag for flags in recipe.always.values() for flag in flags]


def test_the_command_prints_it_and_compares_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    config_json = (recipes_folder() / "models" / "qwen3_235b.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config_json)
    monkeypatch.setenv("BASE", str(tmp_path))
    assert main(["config", "--from-slime", str(script(tmp_path))]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert compose("mine", ["data.eval_files=[]"], str(tmp_path)).rollout.replicas == 2
    (tmp_path / "model" / "config.json").write_text(config_json.replace("4096", "2048"))
    assert main(["config", "--from-slime", str(script(tmp_path))]) == 2
    assert "--hidden-size says 4096, and config.json in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("--advantage-estimator grpo", "--advantage-estimator gspoo", "gspoo has no counterpart.*did you mean gspo?"),
        ("--global-batch-size 64", "--global-batch-size 60", "256 responses .* cannot be cut into batches of"),
        ("--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 5", "16 GPUs cannot be shared out"),
        ("--use-tis", "--use-tiss", "--use-tiss is known neither to slime nor .*did you mean --use-tis?"),
        ("--use-tis", "--loss-type sft_loss", "which is megarl sft here"),
    ],
)
def test_what_cannot_be_translated_is_one_sentence(tmp_path: Path, before: str, after: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_slime(script(tmp_path, before, after), {"BASE": "/b"})


# As in slime's own script of Kimi-K2, arrays may follow, or flags.
@pytest.mark.parametrize("line", ["--colocate \\\n", "python3 train.py \\\n"])
def test_arguments_behind_a_forgotten_backslash_are_refused(tmp_path: Path, line: str) -> None:
    run = script(tmp_path, line, line.replace("\\", ""))
    following = RUN.partition(line)[0].count("\n") + 2
    with pytest.raises(UserError, match=rf"run\.sh:{following}: these arguments are given to no program: a backslash"):
        from_slime(run, {"BASE": "/b"})


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("estimator", "advantage"),
    [
        ("ppo", "gae"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
    ],
)
def test_advantages_that_are_whitened_here_and_not_there_are_said(
    tmp_path: Path, estimator: str, advantage: str, normalized: bool
) -> None:
    chosen = f"--advantage-estimator {estimator}"
    flags = chosen + " --normalize-advantages" * normalized
    recipe = from_slime(script(tmp_path, "--advantage-estimator grpo", flags), {"BASE": "/b"})
    assert recipe.get("algorithm.advantage") == advantage
    notes = [why for why, settings in recipe.absent.items() if chosen in settings]
    assert [why.split(",")[0] for why in notes] == ([] if normalized else [f"{advantage} whitens advantages here"])
    assert ("--normalize-advantages" in said(recipe.always)) == normalized
    assert "--normalize-advantages" not in said(recipe.absent)


def test_advantages_that_are_whitened_there_and_not_here_are_said(tmp_path: Path) -> None:
    flags = "--advantage-estimator grpo --normalize-advantages"
    recipe = from_slime(script(tmp_path, "--advantage-estimator grpo", flags), {"BASE": "/b"})
    (why,) = [why for why, settings in recipe.absent.items() if "--normalize-advantages" in settings]
    assert why == "only gae, reinforce_plus_plus, reinforce_plus_plus_baseline whiten advantages here, and always do"


def test_advantages_called_whitened_are_all_that_are() -> None:
    """All that scripts of slime become are asked."""
    inputs = {
        "responses": Ragged(torch.tensor([1, 3, 2, 2])),
        "groups": torch.tensor([0, 0, 1, 1]),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 3.0]),
        "values": torch.tensor([0.3, 0.1, 0.2, 0.5, 0.1, 0.0, 0.2, 0.9]),
    }
    for advantage in {advantage for advantage, _ in ADVANTAGES.values()}:
        estimated = estimate(advantage, inputs)[0].double()
        is_white = float(estimated.mean()) == pytest.approx(0, abs=1e-5)
        is_white &= float(estimated.std()) == pytest.approx(1, abs=1e-3)
        assert is_white == (advantage in WHITENED), advantage


@pytest.mark.parametrize(
    ("estimator", "lost"),
    [
        *((name, "grpo, gspo and cispo make nothing of this KL") for name in ("grpo", "gspo", "cispo")),
        ("reinforce_plus_plus_baseline", "each token's advantage bears the KL of that token"),
        ("reinforce_plus_plus", None),
        ("ppo", None),
    ],
)
def test_a_kl_in_the_reward_is_there_where_slime_has_one(tmp_path: Path, estimator: str, lost: str | None) -> None:
    flags = f"--advantage-estimator {estimator} --kl-coef 0.01 --kl-loss-type k1"
    run = script(
        tmp_path, "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl", flags
    )
    recipe = from_slime(run, {"BASE": "/b"})
    found = [recipe.get(f"algorithm.{key}") for key in ("kl_coefficient", "kl_in", "kl_estimator")]
    assert found == ([None] * 3 if lost else [0.01, "reward", "k1"])
    assert [lost in why for why, settings in recipe.absent.items() if "--kl-coef 0.01" in settings] == [True] * bool(
        lost
    )


@pytest.mark.parametrize(
    ("flags", "is_weighed"),
    [
        ("--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k3", True),
        ("--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00", False),
        ("--advantage-estimator grpo", False),
        ("--advantage-estimator gspo --kl-coef 0.01", False),
        ("--advantage-estimator ppo --kl-coef 0.01", False),
    ],
)
def test_a_kl_is_weighed_where_there_is_one_in_the_loss(tmp_path: Path, flags: str, is_weighed: bool) -> None:
    before = "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl"
    recipe = from_slime(script(tmp_path, before, f"{flags} --use-unbiased-kl"), {"BASE": "/b"})
    assert recipe.get("algorithm.kl_unbiased") is (True if is_weighed else None)
    said_of_it = [why for why, flags in recipe.always.items() if "--use-unbiased-kl" in flags]
    assert said_of_it == ["there is no KL in the loss, which it would weigh"] * (not is_weighed)
    assert not any("--use-unbiased-kl" in flags for flags in recipe.absent.values())


@pytest.mark.parametrize("flag", FLAGS)
def test_no_argument_of_slime_is_called_unknown(tmp_path: Path, flag: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{flag}: 1\n")
    try:
        from_slime(tmp_path / "run.yaml", {})
    except UserError as error:  # for a value that it cannot have
        sentence = error.sentence
    else:
        sentence = ""
    assert "is known neither" not in sentence


def test_the_critic_of_earlier_versions_has_its_own_settings(tmp_path: Path) -> None:
    critic = "--critic-lr 1e-5 --critic-lr-warmup-iters 5 --critic-num-nodes 1 --critic-num-gpus-per-node 8"
    given = {"BASE": "/b"}
    recipe = from_slime(script(tmp_path, "--advantage-estimator grpo", f"--advantage-estimator ppo {critic}"), given)
    assert values(recipe, "critic.") == {
        "critic.ranks": 8,
        "critic.value_clip": 0.2,
        "critic.warmup_steps": 0,
        "critic.megatron.lr": 1e-5,
        "critic.megatron.lr_warmup_steps": 5,
    }
    none = from_slime(script(tmp_path, "--advantage-estimator grpo", f"--advantage-estimator grpo {critic}"), given)
    assert values(none, "critic.") == {}
    assert "--critic-lr 1e-5" in none.always["this advantage has no critic"]


@pytest.mark.parametrize(
    ("steps", "given", "ends"),
    [
        ("--num-rollout 300", "", None),
        ("--num-rollout 300", "--num-critic-only-steps 9", 300 * 4),
        ("--num-rollout 300", "--num-critic-only-steps 9 --lr-decay-iters 7", 7),
        ("--num-epoch 3", "--num-critic-only-steps 9", None),
    ],
)
def test_steps_of_the_critic_alone_are_steps_of_the_decay(
    tmp_path: Path, steps: str, given: str, ends: int | None
) -> None:
    text = script(tmp_path, "--advantage-estimator grpo", f"--advantage-estimator ppo {given}").read_text()
    text = text.replace("--lr-decay-style constant", "--lr-decay-style cosine").replace("--num-rollout 300", steps)
    (tmp_path / "run.sh").write_text(text)
    recipe = from_slime(tmp_path / "run.sh", {"BASE": "/b"})
    assert recipe.get("megatron.lr_decay_steps") == ends
    is_open = steps == "--num-epoch 3"
    assert ("--num-critic-only-steps 9" in [each for flags in recipe.absent.values() for each in flags]) == is_open


@pytest.mark.parametrize(
    ("given", "samples", "temperature", "lost"),
    [
        ("", 1, 0.8, []),
        ("--eval-temperature 0.6 --eval-top-p 1 --eval-top-k -1", 1, 0.6, []),
        ("--eval-top-p 0.7", 1, 0.8, ["--eval-top-p 0.7"]),
        ("--n-samples-per-eval-prompt 4 --eval-temperature 0 --eval-top-p 0.7", 1, None, []),
        ("--n-samples-per-eval-prompt 4 --eval-top-k 1", 1, None, []),
        ("--rollout-top-k 1", 1, None, []),
        ("--rollout-top-p 0.9 --rollout-top-k 20", 1, 0.8, ["--rollout-top-p 0.9", "--rollout-top-k 20"]),
        ("--eval-temperature 0.00001", 1, None, []),
    ],
)
def test_held_out_responses_are_sampled_as_others_are(
    tmp_path: Path, given: str, samples: int, temperature: float | None, lost: list[str]
) -> None:
    recipe = from_slime(script(tmp_path, "--n-samples-per-eval-prompt 16", given), {"BASE": "/b"})
    assert (recipe.get("loop.eval_samples"), recipe.get("loop.eval_temperature")) == (samples, temperature)
    flags = [flag for flags in recipe.absent.values() for flag in flags if "eval-" in flag or "top" in flag]
    assert flags == ["--eval-prompt-data aime /b/aime.jsonl", *lost]
    several = "--n-samples-per-eval-prompt 4"
    assert (several in said(recipe.always)) == (temperature is None and several in given)


def test_the_seed_of_rollouts_is_the_seed_here(tmp_path: Path) -> None:
    recipe = from_slime(script(tmp_path, "--use-tis", "--rollout-seed 7 --seed 8"), {"BASE": "/b"})
    assert recipe.get("loop.seed") == 7


def test_what_a_script_leaves_open_is_as_slime_has_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("hf-checkpoint: /m\nrollout-batch-size: 8\nnum-rollout: 5\nsave-interval: 4\n")
    recipe = from_slime(tmp_path / "run.yaml", {})
    assert values(recipe, "megatron.", "data.", "checkpoint.", "loop.seed") == {
        "megatron.lr": 1e-6,
        "megatron.weight_decay": 0.01,
        "megatron.lr_decay_style": "linear",
        "data.shuffle": False,
        "checkpoint.every": 4,
        "checkpoint.keep_every": 4,
        "loop.seed": 42,
    }


@pytest.mark.parametrize(("rows", "steps"), [(70, 3 * 2), (None, "???")])
def test_epochs_become_steps_where_the_data_is_there(tmp_path: Path, rows: int | None, steps: int | str) -> None:
    if rows:
        pq.write_table(pa.table({"prompt": ["What?"] * rows}), tmp_path / "train.parquet")
    recipe = from_slime(script(tmp_path, "--num-rollout 300", "--num-epoch 3"), {"BASE": str(tmp_path)})
    assert recipe.get("loop.steps") == steps


def test_epochs_do_not_count_beside_steps(tmp_path: Path) -> None:
    recipe = from_slime(script(tmp_path, "--num-rollout 300", "--num-rollout 300 --num-epoch 3"), {"BASE": "/b"})
    assert recipe.get("loop.steps") == 300
    assert "--num-epoch 3" in recipe.always["--num-rollout says it"]


@pytest.mark.parametrize(
    ("given", "function", "weight", "behind"),
    [
        ("deepscaler", "math", 1.0, "</think>"),
        ("math", "math", 1.0, ""),
        ("dapo", "math_dapo", 2.0, ""),
        ("dapo --reward-key acc", "math_dapo", 1.0, ""),
    ],
)
def test_right_and_wrong_answers_are_as_far_apart_as_there(
    tmp_path: Path, given: str, function: str, weight: float, behind: str
) -> None:
    """With --rm-type dapo they are worth 1 and -1 in slime's own function, with all others 1 and 0."""
    recipe = from_slime(script(tmp_path, "--rm-type deepscaler", f"--rm-type {given}"), {"BASE": "/b"})
    check(recipe)
    (tmp_path / "mine.yaml").write_text(recipe.yaml("A recipe"))
    (term,) = terms_of(compose_open("mine", (), str(tmp_path))[0].reward)
    assert (term.source.spec, term.weight, term.answer_after) == (function, weight, behind)
    assert ("--rm-type dapo" in [flag for flags in recipe.always.values() for flag in flags]) == (weight == 2.0)
