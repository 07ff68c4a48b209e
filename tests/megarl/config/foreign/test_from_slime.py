"""Scripts of slime become recipes that do the same; arguments without a counterpart are said."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from slime_scripts import RUN, script
from verl_scripts import said

from converters.errors import UserError
from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.config.folder import recipes_folder
from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.recipe import TranslatedRecipe, check
from megarl.config.origins import compose_open, leaves
from megarl.rewards.terms import terms_of

FLAGS = (Path(__file__).parent / "slime_arguments.txt").read_text().split()
"""Arguments that slime itself has, of its present and of earlier versions."""


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
        "algorithm.max_refills": 10**6,
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
