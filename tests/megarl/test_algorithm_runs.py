"""The algorithms with more than a policy and a reward: each recipe runs, and its own measure goes the right way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from converters.formats.safetensors import HuggingFaceCheckpoint
from megarl.config.compose import compose
from megarl.config.validate import validate
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.checkpoints import checkpoints_folder
from megarl.schema import MegarlConfig
from megarl.tracking import read_history
from megarl.train import train
from megatron_ext.checkpoint.checkpoint_folder import complete_iterations, iteration_folder

pytestmark = pytest.mark.usefixtures("shared_cluster")

# A policy that knows nothing begins one response in five with a digit, and learns to within a few steps.
REWARD = f"reward.function={Path(__file__).with_name('digits.py')}:begins_with_a_digit"
STEPS = 12


@dataclass(frozen=True)
class Run:
    """A recipe, what is different about it here, and what has to hold of its lines of metrics."""

    recipe: str
    holds: Callable[[Sequence[dict[str, Any]]], None]
    overrides: tuple[str, ...] = ()
    marks: tuple[pytest.MarkDecorator, ...] = ()


def mean(history: Sequence[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in history) / len(history)


def rewards_rise(history: Sequence[dict[str, Any]], by: float = 0.2) -> None:
    assert mean(history[-3:], "reward/mean") > mean(history[:3], "reward/mean") + by


def critic_learns_first(history: Sequence[dict[str, Any]]) -> None:
    warm_up, rest = history[:14], history[14:]
    assert all("policy/loss" not in line for line in warm_up)
    assert all("policy/loss" in line for line in rest)
    assert mean(warm_up[-2:], "value/loss") < 0.8 * warm_up[0]["value/loss"]
    assert mean(warm_up[-2:], "value/explained_variance") > warm_up[0]["value/explained_variance"] + 0.15
    assert mean(rest[-2:], "reward/mean") > mean(warm_up, "reward/mean") + 0.3
    # The decay ends with the policy's own steps, four to a rollout, and not with as many as the critic takes.
    assert rest[-1]["policy/learning_rate"] == pytest.approx(1.9e-3 + 1e-4 / (4 * len(rest)), rel=1e-9)


def implicit_rewards_tell_right_from_wrong(history: Sequence[dict[str, Any]]) -> None:
    assert history[0]["prime/accuracy"] == 0.5
    assert mean(history[-3:], "prime/accuracy") > 0.7
    assert mean(history[-3:], "prime/loss") < history[0]["prime/loss"]
    rewards_rise(history)


def the_teacher_comes_nearer(history: Sequence[dict[str, Any]]) -> None:
    assert mean(history[-3:], "distillation/kl") < 0.7 * history[0]["distillation/kl"]
    # A teacher of another source's prompts would teach something else.
    assert {name for name in history[0] if name.startswith("reward/source/")} == {
        "reward/source/even/mean",
        "reward/source/odd/mean",
    }


def earlier_selves_are_beaten(history: Sequence[dict[str, Any]]) -> None:
    rewards_rise(history)
    # The reference is the present policy again after every fourth step.
    to_reference = [line["policy/kl_to_reference"] for line in history]
    assert to_reference[4] < 1e-6 < to_reference[3]


def prompts_without_signal_are_replaced(history: Sequence[dict[str, Any]]) -> None:
    assert max(line["groups/rounds"] for line in history) > 1
    # The engine samples the next batch while this one is trained on.
    assert [line["staleness/max"] for line in history] == [0, *[1] * (len(history) - 1)]
    assert all(line["advantage/zero_fraction"] == 0 for line in history)
    rewards_rise(history)


def both_rewards_rise_and_the_kl_is_held(history: Sequence[dict[str, Any]]) -> None:
    before, *steps = history
    rewards_rise(steps)
    assert mean(steps[-3:], "reward/part/reward_model") > mean(steps[:3], "reward/part/reward_model")
    coefficients = [line["policy/kl_coefficient"] for line in steps]
    # Below the target the coefficient falls, above it rises.
    for line, coefficient, following in zip(steps, coefficients, coefficients[1:], strict=False):
        assert (following > coefficient) == (line["policy/kl_to_reference"] > 0.05)
    # The best of four responses to a held-out prompt is better than their mean, and both are better than before.
    for line in (before, steps[-1]):
        assert line["eval/accuracy"] < line["eval/pass_at_2"] < line["eval/pass_at_4"] == line["eval/best_at_4"]
    assert steps[-1]["eval/accuracy"] > before["eval/accuracy"] + 0.2
    assert steps[-1]["eval/best_at_4"] > before["eval/best_at_4"]


RUNS = (
    Run(
        "quickstart_ppo",
        critic_learns_first,
        (
            "rollout.engine=vllm",
            "critic.ranks=1",
            "critic.warmup_steps=14",
            "checkpoint.every=7",  # before the policy has made a step
            "critic.megatron.lr=2e-3",
            "critic.megatron.min_lr=2e-3",
            "megatron.min_lr=1.9e-3",
            "algorithm.updates_per_step=4",
            "loop.prompts_per_step=16",
            "loop.steps=20",
        ),
        marks=(pytest.mark.long,),
    ),
    Run(
        "quickstart_prime",
        implicit_rewards_tell_right_from_wrong,
        ("implicit_reward_model.megatron.lr=2e-3", "implicit_reward_model.megatron.min_lr=2e-3"),
        marks=(pytest.mark.long,),
    ),
    Run(
        "quickstart_distillation",
        the_teacher_comes_nearer,
        (
            "teachers.sums.path={other}",
            "teachers.sums.data_sources=[even]",
            "+teachers.more={{path: {model}, ranks: 1, data_sources: [odd]}}",
        ),
        marks=(pytest.mark.long,),
    ),
    Run(
        "quickstart_sppo",
        earlier_selves_are_beaten,
        (
            "megatron.lr=1e-3",
            "megatron.min_lr=1e-3",
            "algorithm.refresh_reference_every=4",
        ),
        marks=(pytest.mark.long,),
    ),
    Run(
        "quickstart_dapo",
        prompts_without_signal_are_replaced,
        ("loop.steps=6", "schedule.max_staleness=1", "algorithm.ratio_to=interpolated"),
        marks=(pytest.mark.long,),
    ),
    Run(
        "quickstart",
        both_rewards_rise_and_the_kl_is_held,
        (
            "data.eval_files=[{held_out}]",
            "loop.eval_samples=4",
            f"loop.eval_every={STEPS}",
            "reward_model.path={scorer}",
            "reward_model.ranks=1",
            "reward_model.weight=0.1",
            "algorithm.advantage=remax",
            "rollout.engine=vllm",
            "algorithm.kl_in=reward",
            "algorithm.kl_estimator=k1",
            "algorithm.kl_coefficient=0.01",
            "algorithm.kl_target=0.05",
            "algorithm.kl_horizon=32",
        ),
        marks=(pytest.mark.long,),
    ),
)


@pytest.mark.parametrize("run", [pytest.param(each, marks=each.marks, id=each.recipe) for each in RUNS])
def test_its_own_measure_goes_the_right_way(run: Run, tmp_path: Path) -> None:
    model = write_tiny_model("qwen3", tmp_path / "model", seed=1)
    files = write_arithmetic(tmp_path / "data")
    name_sources(files.train)
    folders = {"model": model, "other": write_tiny_model("qwen3", tmp_path / "other", seed=2)}
    folders["held_out"] = files.eval
    folders["scorer"] = write_scorer(folders["other"], tmp_path / "scorer")
    config = compose(
        run.recipe,
        [
            f"model.path={model}",
            f"data.train_files=[{files.train}]",
            f"output_dir={tmp_path / 'run'}",
            REWARD,
            "megatron.expert_model_parallel_size=1",
            "cluster.trainer_ranks=1",
            "megatron.lr=2e-3",
            "megatron.min_lr=2e-3",
            f"loop.steps={STEPS}",
            "loop.prompts_per_step=8",
            "loop.samples_per_prompt=8",
            "rollout.max_response_tokens=4",
            "reward.overlong_buffer_tokens=0",
            "tracking.loggers=[jsonl]",
            # It starts in a third of the time of another engine.
            "rollout.engine=transformers",
            *(override.format(**folders) for override in run.overrides),
        ],
    )
    validate(config, "train")
    train(config)
    run.holds(read_history(tmp_path / "run"))
    check_what_is_left(tmp_path / "run", config)


def name_sources(file: Path) -> None:
    """Prompts of two kinds, in turn."""
    rows = pq.read_table(file).to_pylist()
    named = [{**row, "data_source": ("even", "odd")[number % 2]} for number, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(named), file)


def write_scorer(model: Path, folder: Path) -> Path:
    """A reward model with random weights, and a tokenizer."""
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def check_what_is_left(folder: Path, config: MegarlConfig) -> None:
    """The last checkpoint and the exports are of all models that were trained."""
    assert complete_iterations(checkpoints_folder(config))[-1] == config.loop.steps
    checkpoint = iteration_folder(checkpoints_folder(config), config.loop.steps)
    exported = {"huggingface"}
    if config.algorithm.advantage == "gae":
        exported.add("critic")
        assert "score.weight" in HuggingFaceCheckpoint(folder / "critic").shapes
    if config.algorithm.advantage == "prime":
        exported.add("implicit_reward_model")
    assert {path.parent.name for path in folder.glob("*/config.json")} == exported
    assert {path.parent.name for path in checkpoint.glob("*/common.pt")} == exported - {"huggingface"}
