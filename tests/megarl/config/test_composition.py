"""Parts of an algorithm that do not go together are refused before anything starts."""

from dataclasses import replace

import pytest

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES
from megarl.config.compose import compose
from megarl.config.composition import check_composition
from megarl.config.folder import recipes_folder
from megarl.config.without_effect import without_effect
from megarl.models.auxiliary import wanted_auxiliary
from megarl.rollout import ENGINES
from megarl.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    ImplicitRewardModelConfig,
    LoopConfig,
    MegarlConfig,
    ModelConfig,
    RewardConfig,
    RewardModelConfig,
    RewardTermConfig,
    RolloutConfig,
    ScheduleConfig,
    TeacherConfig,
)


def config(*, samples: int = 8, shared: bool = False, **groups) -> MegarlConfig:
    algorithm = AlgorithmConfig(**groups.pop("algorithm", {}))
    return MegarlConfig(
        algorithm=algorithm, loop=LoopConfig(samples_per_prompt=samples, shared_prefixes=shared), **groups
    )


@pytest.mark.parametrize("advantage", [name for name, each in ADVANTAGES.items() if each.smallest_group > 1])
def test_groups_of_one_with_group_statistics(advantage: str) -> None:
    with pytest.raises(UserError, match=f"samples_per_prompt=1 with algorithm.advantage={advantage}"):
        check_composition(config(samples=1, algorithm={"advantage": advantage}))


INTERPOLATED = {
    "algorithm": {
        "ratio_to": "interpolated",
        "updates_per_step": 4,
        "corrections": [CorrectionConfig("icepop", 0.5, 5.0)],
    }
}
REPLAY = {"algorithm": {"router_replay": "rollout"}, "rollout": RolloutConfig(engine="transformers")}
REFUSED = {
    "PRIME with a frozen reward model": (
        {"algorithm": {"advantage": "prime"}, "reward_model": RewardModelConfig("x")},
        r"^reward_model\.path is set, .*advantage=prime learns an implicit one .*: set implicit_reward_model\.path$",
    ),
    "PRIME with the weight of a frozen reward model": (
        {"algorithm": {"advantage": "prime"}, "reward_model": RewardModelConfig(weight=0.5)},
        r"^reward_model\.weight is set, .*: leave it out$",
    ),
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
        "dynamic_sampling looks for prompts whose responses differ",
    ),
    "a filter of groups of one": (
        {"samples": 1, "algorithm": {"advantage": "reinforce_plus_plus", "filter_groups": True, "filter_low": 0.2}},
        "filter_groups looks for prompts whose responses differ",
    ),
    "a router that cannot be told": (
        {"megatron": {"moe_router_fusion": True}, **REPLAY},
        r"megatron\.moe_router_fusion chooses the experts within a kernel, and algorithm\.router_replay=rollout",
    ),
    "an engine that is told to be silent": (
        {
            "rollout": RolloutConfig(engine="transformers", engine_args={"enable_return_routed_experts": False}),
            "algorithm": {"router_replay": "rollout"},
        },
        r"enable_return_routed_experts=False contradicts algorithm\.router_replay=rollout: leave it out",
    ),
    "an engine that would name the experts of other tokens": (
        {**REPLAY, "rollout": RolloutConfig(engine="sglang", engine_args={"moe_a2a_backend": "mooncake"})},
        r"moe_a2a_backend=mooncake is not supported with algorithm\.router_replay=rollout: .*of others; use none",
    ),
    "experts of each response and one prompt for all": (
        {"shared": True, **REPLAY},
        r"router_replay=rollout and loop\.shared_prefixes=true: .*; leave out one of the two",
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
    "MaxRL with a penalty": (
        {"algorithm": {"advantage": "max_rl"}, "reward": RewardConfig(overlong_buffer_tokens=20)},
        r"max_rl needs rewards of at least 0, and reward\.overlong_buffer_tokens makes rewards below 0",
    ),
    "MaxRL with a KL in the reward": (
        {"algorithm": {"advantage": "max_rl", "kl_in": "reward", "kl_estimator": "k1", "kl_coefficient": 0.01}},
        r"max_rl needs .* and algorithm\.kl_in=reward makes",
    ),
    "MaxRL with a reward model": (
        {"algorithm": {"advantage": "max_rl"}, "reward_model": RewardModelConfig("x")},
        r"max_rl needs .* and reward_model\.path makes",
    ),
    "PRIME with a penalty": (
        {"algorithm": {"advantage": "prime"}, "reward": RewardConfig(overlong_buffer_tokens=20)},
        r"prime needs outcomes from 0 to 1, and reward\.overlong_buffer_tokens makes",
    ),
    "PRIME with a negative weight": (
        {
            "algorithm": {"advantage": "prime"},
            "reward": RewardConfig(functions={"a": RewardTermConfig("math"), "b": RewardTermConfig("format", -0.1)}),
        },
        r"prime needs .* and reward\.functions\.b\.weight below 0 makes",
    ),
    "top_p with corrections": (
        {
            "algorithm": {"corrections": [CorrectionConfig("sequence_mean_band", 0.99, 1.01)]},
            "rollout": RolloutConfig(top_p=0.99),
        },
        r"algorithm\.corrections with rollout\.top_p=0\.99: .* sample from all tokens with rollout\.top_p=1\.0",
    ),
    "top_k with several updates": (
        {"algorithm": {"updates_per_step": 2}, "rollout": RolloutConfig(top_k=50)},
        r"algorithm\.updates_per_step above 1 with rollout\.top_k=50: .* with rollout\.top_k=-1",
    ),
    "top_p with ratios to the rollout": (
        {"algorithm": {"ratio_to": "rollout"}, "rollout": RolloutConfig(top_p=0.9)},
        r"algorithm\.ratio_to=rollout with rollout\.top_p",
    ),
    "top_p with an off-policy mask": (
        {"algorithm": {"off_policy_mask": 0.1}, "rollout": RolloutConfig(top_p=0.9)},
        r"algorithm\.off_policy_mask with rollout\.top_p",
    ),
    "top_p with a KL weighed by the ratio": (
        {"algorithm": {"kl_unbiased": True, "kl_coefficient": 0.01}, "rollout": RolloutConfig(top_p=0.9)},
        r"algorithm\.kl_unbiased with rollout\.top_p",
    ),
    "corrections from the engine to itself": (
        INTERPOLATED,
        r"ratio_to=interpolated .*max_staleness=0 none has any: .* every correction 1; use ratio_to=old",
    ),
    "a filter on a reward that is not there": (
        {
            "algorithm": {"filter_groups": True, "filter_on": "acc"},
            "reward": RewardConfig(functions={"a": RewardTermConfig("math"), "b": RewardTermConfig("format")}),
        },
        r"filter_on=acc is none of outcome, reward, a, b, nor a part",
    ),
    "a coefficient of distillation without a teacher": (
        {"algorithm": {"distillation_coefficient": 0.1}},
        r"distillation_coefficient=0\.1 needs a teacher",
    ),
    "distillation twice": (
        {
            "algorithm": {"advantage": "distillation", "distillation_coefficient": 0.1},
            "teachers": {"a": TeacherConfig("x")},
        },
        "advantage=distillation is the teachers alone",
    ),
    "an unknown loss": ({"algorithm": {"policy_loss": "cspo"}}, "did you mean cispo|did you mean gspo"),
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
    "MaxRL with a KL in the loss": {"algorithm": {"advantage": "max_rl", "kl_coefficient": 0.01}},
    "MaxRL with a penalty of 0": {
        "algorithm": {"advantage": "max_rl"},
        "reward": RewardConfig(overlong_buffer_tokens=20, overlong_penalty=0.0),
    },
    "PRIME with an implicit reward model's path": {
        "algorithm": {"advantage": "prime"},
        "implicit_reward_model": ImplicitRewardModelConfig("x"),
    },
    "a filter on a part of a reward": {
        "algorithm": {"dynamic_sampling": True, "filter_on": "a/acc"},
        "reward": RewardConfig(functions={"a": RewardTermConfig("math"), "b": RewardTermConfig("format")}),
    },
    "interpolation between versions": {**INTERPOLATED, "schedule": ScheduleConfig(max_staleness=1)},
    "top_p on-policy": {"rollout": RolloutConfig(top_p=0.9, top_k=50)},
    "distillation beside a reward": {
        "algorithm": {"distillation_coefficient": 0.1},
        "teachers": {"a": TeacherConfig("x")},
    },
    "ReMax": {"samples": 1, "algorithm": {"advantage": "remax"}},
}


@pytest.mark.parametrize("groups", ALLOWED.values(), ids=ALLOWED)
def test_it_is_taken(groups: dict) -> None:
    check_composition(config(**groups))


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [({"advantage": "distillation"}, ["teacher_a"]), ({"distillation_coefficient": 0.1}, ["teacher_a"]), ({}, [])],
)
def test_teachers_are_started_where_something_learns_from_them(algorithm: dict, wanted: list[str]) -> None:
    run = config(algorithm=algorithm, teachers={"a": TeacherConfig("x")}, model=ModelConfig("y"))
    assert list(wanted_auxiliary(run)) == wanted


def test_an_engine_that_does_not_say_where_tokens_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "transformers", replace(ENGINES["transformers"], returning_experts=None))
    with pytest.raises(UserError, match=r"rollout\.engine=transformers does not: use one of vllm, sglang, or"):
        check_composition(config(**REPLAY))


PRESETS = sorted(file.stem for file in (recipes_folder() / "algorithm").glob("*.yaml"))
RECIPES = sorted(file.stem for file in recipes_folder().glob("*.yaml"))
LARGE = [name for name in RECIPES if name.endswith(("_moe", "_v3")) and not name.startswith("sft")]


def with_preset(recipe: str, preset: str) -> MegarlConfig:
    teacher = ["+teachers={a: {path: x}}"] if preset == "distillation" else []
    return compose(recipe, ["model.path=x", "output_dir=x", f"+algorithm={preset}", *teacher])


@pytest.mark.parametrize("recipe", ["quickstart", "grpo_qwen3_moe"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_whole(preset: str, recipe: str) -> None:
    config = with_preset(recipe, preset)
    check_composition(config)
    assert without_effect(config) == []
    assert config.loop.prompts_per_step % config.algorithm.updates_per_step == 0


@pytest.mark.parametrize("recipe", LARGE)
def test_the_large_recipes_correct_for_the_engine_and_set_nothing_that_cannot_act(recipe: str) -> None:
    config = compose(recipe, ["model.path=x", "output_dir=x"])
    check_composition(config)
    assert without_effect(config) == []
    assert config.algorithm.corrections
    assert config.model.fp32_logits
    assert config.loop.prompts_per_step % config.algorithm.updates_per_step == 0


def test_a_preset_is_chosen_in_the_place_of_the_recipes() -> None:
    assert compose("quickstart_dapo", ["model.path=x", "algorithm=gspo"]).algorithm.policy_loss == "gspo"
    with pytest.raises(UserError, match=r"add one with \+algorithm=gspo"):
        compose("quickstart", ["model.path=x", "algorithm=gspo"])
