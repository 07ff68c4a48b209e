"""The passes of the policy that a step makes before its updates are those that `megarl plan` counts."""

from pathlib import Path

import numpy as np
import pytest
from trajectories import group

from megarl.algorithms import PolicyObjective
from megarl.cli import plan_recipe
from megarl.cli.main import build_parser
from megarl.cli.recipe import read_config
from megarl.cluster.trainer.batch import REFERENCE, Batch
from megarl.config.folder import recipes_folder
from megarl.config.purpose import commands_of
from megarl.models.auxiliary import AuxiliaryModels, Teacher, wanted_auxiliary
from megarl.schema import MegarlConfig, TeacherConfig
from megarl.stages.model_outputs import with_model_outputs

PRESETS = sorted(file.stem for file in (recipes_folder() / "algorithm").glob("*.yaml"))
RECIPES = sorted(file.stem for file in recipes_folder().glob("*.yaml"))
TEACHER = ["+teachers={sums: {path: teacher}}"]
SINGLE = ["--config-name", "grpo_qwen3_moe", "algorithm.updates_per_step=1"]
SEVERAL = ["--config-name", "grpo_qwen3_moe", "algorithm.updates_per_step=4"]
KL = "algorithm.kl_coefficient=0.1"
CASES = {
    "one update": (SINGLE, []),
    "several updates": (SEVERAL, ["log_probs"]),
    "KL in the loss": ([*SINGLE, KL], ["reference_log_probs"]),
    "KL in the reward": ([*SINGLE, KL, "algorithm.kl_in=reward"], ["reference_log_probs", "log_probs"]),
    "a ratio to the rollout": ([*SEVERAL, "algorithm.ratio_to=rollout", "algorithm.corrections=[]"], []),
    "squares beside log-probs": (
        [*SINGLE, "algorithm.advantage=optimal_token_baseline"],
        ["log_probs", "probability_squares"],
    ),
    "a teacher beside rewards": ([*SINGLE, "algorithm.distillation_coefficient=0.1", *TEACHER], ["log_probs"]),
}
"""Words for `megarl plan`, and the predictions that a run of its recipe asks the policy for."""


class Ranks:
    """Ranks of the policy, or of a teacher: they write down the names of predictions that are asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.replays: list[bool] = []

    def predictions(self, batch, names, *, temperature, replay=False):
        self.asked += names
        self.replays.append(replay)
        return {name: [(np.zeros(length, np.float32),) for length in batch.lengths] for name in names}

    def log_probs(self, batch, *, temperature):
        return self.predictions(batch, ["log_probs"], temperature=temperature)["log_probs"]


def planned_passes(words: list[str]) -> int:
    options, overrides = build_parser().parse_known_args(["plan", *words, "--model", "qwen3_1_7b"])
    options.overrides = overrides
    plan_recipe.complete(options)
    return options.log_prob_passes


def composed(words: list[str]) -> MegarlConfig:
    given = [*words, "output_dir=out"]
    if not any(word.startswith("model.path") for word in words):
        given.append("model.path=model")
    options, overrides = build_parser().parse_known_args(["train", *given])
    options.overrides = overrides
    return read_config(options)


def asked_of_the_policy(config: MegarlConfig) -> list[str]:
    """The names that a step asks the policy for, with the teachers that a run would start."""
    policy, ranks = Ranks(), Ranks()
    wanted = wanted_auxiliary(config).items()
    teachers = {name: Teacher(ranks, TeacherConfig()) for name, each in wanted if each.key.startswith("teachers.")}
    batch = Batch(np.array([2]), [(np.array([1, 2]),)])
    objective = PolicyObjective(config.algorithm)
    with_model_outputs(
        batch, [group(0, [1], ([2], 1.0))], policy, AuxiliaryModels(teachers=teachers), objective, config
    )
    # By the experts of the rollout, if the batch has them; teachers are other models.
    assert all(policy.replays)
    assert not any(ranks.replays)
    return policy.asked


def passes_of(names: list[str]) -> int:
    """A pass gives every prediction of one model."""
    return len({name.startswith(REFERENCE) for name in names})


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_of_a_preset_counts_the_passes_of_its_step(preset: str) -> None:
    words = ["--config-name", "quickstart", f"+algorithm={preset}", *(TEACHER if preset == "distillation" else [])]
    asked = asked_of_the_policy(composed(words))
    assert planned_passes(words) == len(asked) == passes_of(asked)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_of_a_recipe_counts_the_passes_of_its_step(recipe: str) -> None:
    words = ["--config-name", recipe, *(["teachers.sums.path=teacher"] if recipe == "quickstart_distillation" else [])]
    config = composed(words)
    if "train" not in commands_of(config):
        pytest.skip("has no step of megarl train")
    asked = asked_of_the_policy(config)
    assert planned_passes(words) == len(asked) == passes_of(asked)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_counts_a_pass_of_each_model_that_is_asked(case: str) -> None:
    words, names = CASES[case]
    assert asked_of_the_policy(composed(words)) == names
    assert planned_passes(words) == passes_of(names)


def test_a_plan_of_more_updates_than_the_recipe_has_counts_their_passes() -> None:
    assert planned_passes([*SINGLE, "--updates", "4"]) == 1
    assert planned_passes([*SEVERAL, "--updates", "1"]) == 0
