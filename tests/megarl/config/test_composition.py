"""Parts of an algorithm that do not go together are refused before anything starts."""

import pytest

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES
from megarl.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, TeacherConfig
from megarl.config.compose import compose
from megarl.config.composition import check_composition
from megarl.config.folder import recipes_folder
from megarl.config.schema import LoopConfig, MegarlConfig, RewardConfig, RewardTermConfig, RolloutConfig


def config(*, samples: int = 8, **groups) -> MegarlConfig:
    algorithm = AlgorithmConfig(**groups.pop("algorithm", {}))
    return MegarlConfig(algorithm=algorithm, loop=LoopConfig(samples_per_prompt=samples), **groups)


@pytest.mark.parametrize("advantage", [name for name, each in ADVANTAGES.items() if each.smallest_group > 1])
def test_groups_of_one_with_group_statistics(advantage: str) -> None:
    with pytest.raises(UserError, match=f"samples_per_prompt=1 with algorithm.advantage={advantage}"):
        check_composition(config(samples=1, algorithm={"advantage": advantage}))


REFUSED = {
    "a value loss without a critic": (
        {"critic": CriticConfig(warmup_steps=3)},
        r"critic\.warmup_steps is set, but algorithm\.advantage=grpo has no critic.*use algorithm\.advantage=gae",
    ),
    "GSPO with token-level weights": (
        {
            "algorithm": {
                "policy_loss": "gspo",
                "aggregation": "seq_mean_token_mean",
                "corrections": [CorrectionConfig("token_importance", high=2.0)],
            }
        },
        "gspo",
    ),
    "GSPO averaged over tokens": ({"algorithm": {"policy_loss": "gspo"}}, "seq_mean"),
    "dynamic sampling in groups of one": (
        {"samples": 1, "algorithm": {"advantage": "reinforce_plus_plus", "dynamic_sampling": True}},
        "looks for prompts whose responses differ",
    ),
    "distillation without a teacher": ({"algorithm": {"advantage": "distillation"}}, "needs a teacher"),
    "a teacher without distillation": ({"teachers": {"a": TeacherConfig("x")}}, "does not learn from any"),
    "one reward normalised apart": ({"algorithm": {"advantage": "gdpo"}}, "name two or more in reward.functions"),
    "k1 in the loss": ({"algorithm": {"kl_estimator": "k1", "kl_coefficient": 0.1}}, "k1"),
    "a KL target without a coefficient": (
        {"algorithm": {"kl_target": 0.1}},
        "set kl_coefficient to the value to start from",
    ),
    "a KL in rewards that nobody reads": (
        {
            "algorithm": {"advantage": "gdpo", "kl_in": "reward", "kl_coefficient": 0.1},
            "reward": RewardConfig(functions={"a": RewardTermConfig("math"), "b": RewardTermConfig("format")}),
        },
        "the KL would be lost: use kl_in=loss",
    ),
    "SPPO's loss on other advantages": (
        {"algorithm": {"policy_loss": "sppo", "aggregation": "seq_mean_token_mean"}},
        "advantage=win_rate",
    ),
    "an earlier self that nothing refers to": (
        {"algorithm": {"refresh_reference_every": 5}},
        "nothing refers to a reference",
    ),
    "a buffer longer than the response": (
        {"reward": RewardConfig(overlong_buffer_tokens=9), "rollout": RolloutConfig(max_response_tokens=8)},
        "overlong_buffer_tokens=9 is more than",
    ),
    "an unknown loss": ({"algorithm": {"policy_loss": "cspo"}}, "did you mean 'cispo'|did you mean 'gspo'"),
}


@pytest.mark.parametrize(("groups", "message"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(groups: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_composition(config(**groups))


ALLOWED = {
    "GRPO": {},
    "PPO": {"samples": 1, "algorithm": {"advantage": "gae"}, "critic": CriticConfig(warmup_steps=3)},
    "GDPO": {
        "algorithm": {"advantage": "gdpo"},
        "reward": RewardConfig(functions={"a": RewardTermConfig("math"), "b": RewardTermConfig("format")}),
    },
    "distillation": {
        "samples": 1,
        "algorithm": {"advantage": "distillation"},
        "teachers": {"a": TeacherConfig("x")},
    },
    "SPPO": {"algorithm": {"policy_loss": "sppo", "advantage": "win_rate", "aggregation": "seq_mean_token_mean"}},
    "ReMax": {"samples": 1, "algorithm": {"advantage": "remax"}},
}


@pytest.mark.parametrize("groups", ALLOWED.values(), ids=ALLOWED)
def test_it_is_taken(groups: dict) -> None:
    check_composition(config(**groups))


PRESETS = sorted(file.stem for file in (recipes_folder() / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_whole(preset: str) -> None:
    teacher = ["+teachers={a: {path: x}}"] if preset == "distillation" else []
    check_composition(compose("quickstart", ["model.path=x", f"+algorithm={preset}", *teacher]))


def test_a_preset_is_chosen_in_the_place_of_the_recipes() -> None:
    assert compose("quickstart_dapo", ["model.path=x", "algorithm=gspo"]).algorithm.policy_loss == "gspo"
    with pytest.raises(UserError, match=r"use \+algorithm=gspo"):
        compose("quickstart", ["model.path=x", "algorithm=gspo"])
