"""Rewards of a command of verl, its own functions and reward models, are worth as much in the recipe."""

from pathlib import Path

import pytest
from verl_scripts import PPO_KEYS, said

from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import check
from megarl.config.origins import compose_open
from megarl.rewards.terms import terms_of

# From verl/utils/reward_score of verl 0.10.0.dev: a value of data_source of each function, wrong and right, and what
# it is here.
SCORES = {
    "openai/gsm8k": (0.0, 1.0, "gsm8k"),
    "lighteval/MATH": (0.0, 1.0, "math"),
    "HuggingFaceH4/MATH-500": (0.0, 1.0, "math"),
    "math_dapo": (-1.0, 1.0, "math_dapo"),
    "math": (-1.0, 1.0, "math_dapo"),
    "math_dapo_reasoning": (-1.0, 1.0, "math_dapo"),
    "aime2024": (-1.0, 1.0, "math_dapo"),
    "numina_olympiads": (0.0, 1.0, "math"),
}
PENALTIES = [
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.7",
    *("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01"),
]


@pytest.mark.parametrize("source", SCORES)
def test_a_right_answer_gains_as_much_over_what_is_subtracted_as_it_does_there(tmp_path: Path, source: str) -> None:
    recipe = from_verl([*PPO_KEYS, *PENALTIES], {})
    check(recipe)
    (tmp_path / "mine.yaml").write_text(recipe.yaml("A recipe"))
    config = compose_open("mine", (), str(tmp_path))[0]
    (term,) = [each for each in terms_of(config.reward) if each.applies_to(source)]
    assert term.source.builtin is not None
    wrong, right, function = SCORES[source]
    assert term.source.spec == function
    assert term.weight * (1.0 - term.source.builtin.nothing["score"]) == right - wrong
    assert (config.reward.overlong_penalty, config.algorithm.kl_coefficient) == (0.7, 0.01)
    shown = "data_source=aime*" if source == "aime2024" else f"data_source={source}"
    assert (shown in said(recipe.always)) == (wrong < 0)


def test_a_reward_model_is_the_only_reward(tmp_path: Path) -> None:
    model = ["reward_model.enable=True", "reward_model.model.path=/models/judge"]
    given = [*PPO_KEYS, *model, "trainer.test_freq=5"]
    recipe = from_verl(given, {})
    check(recipe)
    assert recipe.get("reward_model.path") == "/models/judge"
    (tmp_path / "mine.yaml").write_text(recipe.yaml("A recipe"))
    terms = terms_of(compose_open("mine", (), str(tmp_path))[0].reward)
    assert [(term.weight, term.data_sources, term.source.truth_check()) for term in terms] == [(0.0, (), None)]
    # Held-out responses are scored by rules alone.
    assert recipe.get("loop.eval_every") == 0
    assert sorted(said(recipe.absent)) == ["reward_model.model.path=/models/judge", "trainer.test_freq=5"]
    assert [why for why, settings in recipe.absent.items() if "policy's vocabulary" in why and settings == [model[1]]]
    # It has GPUs as all others have them: in turns.
    assert recipe.get("cluster.pools.all.roles") == ["trainer", "engine", "critic", "reward_model"]


@pytest.mark.parametrize("keys", [("reward_model.", "model.path"), ("reward.reward_model.", "model_path")])
def test_a_reward_model_beside_a_function_is_asked_by_it_alone(keys: tuple[str, str]) -> None:
    """verl's reward loop then gives the function alone, and starts a server for the model."""
    below, path = keys
    model = [f"{below}enable=True", f"{below}{path}=/models/judge", f"{below}rollout.name=sglang"]
    function = ["custom_reward_function.path=mine.py", "trainer.test_freq=5", "reward_model.reward_manager=dapo"]
    recipe = from_verl([*PPO_KEYS, *model, *function, *PENALTIES], {})
    check(recipe)
    assert recipe.get("reward.function") == "mine.py:compute_score"
    assert recipe.get("reward.overlong_penalty") == 0.7
    assert [recipe.get(key) for key in ("reward_model", "reward.functions")] == [None, None]
    assert recipe.get("loop.eval_every") == 5
    assert recipe.absent == {
        "the function asks this model as a server, which you start yourself": [
            *("reward_model.enable=True", "reward_model.model.path=/models/judge", "reward_model.rollout.name=sglang")
        ]
    }


def test_a_reward_model_by_its_name_of_now() -> None:
    model = ["reward.reward_model.enable=True", "reward.reward_model.model_path=/models/judge"]
    recipe = from_verl([*PPO_KEYS, *model], {})
    assert recipe.get("reward_model.path") == "/models/judge"
    assert said(recipe.absent) == ["reward_model.model.path=/models/judge"]


def test_a_reward_model_without_a_path_is_said() -> None:
    recipe = from_verl([*PPO_KEYS, "reward_model.enable=True"], {})
    assert recipe.get("reward_model.path") == "???"


@pytest.mark.parametrize("key", ["reward.num_workers", "reward_model.num_workers"])
def test_the_processes_that_score_are_said_not_to_be_for_async_functions(key: str) -> None:
    recipe = from_verl([*PPO_KEYS, "custom_reward_function.path=mine.py", f"{key}=16"], {})
    check(recipe)
    assert recipe.get("reward.workers") == 16
    (why,) = [why for why, settings in recipe.always.items() if settings == ["custom_reward_function.path=mine.py"]]
    assert "async function scores reward.async_samples" in why
