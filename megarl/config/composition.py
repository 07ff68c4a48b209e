"""Checks that the parts of an algorithm are compatible."""

from dataclasses import fields

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES, PolicyObjective, Rewards, Source
from megarl.algorithms.compatibility import check_algorithm
from megarl.config.schedule import is_corrected_by_schedule
from megarl.rollout import ENGINES
from megarl.schema import CriticConfig, MegarlConfig, RewardModelConfig


def check_composition(config: MegarlConfig) -> None:
    """Raise UserError for the first two incompatible parts, or for a part without something that it needs."""
    check_algorithm(config.algorithm)
    _check_groups(config)
    _check_filter(config)
    _check_auxiliary(config)
    _check_teachers(config)
    _check_kl(config)
    _check_interpolation(config)
    _check_self_play(config)
    _check_ranges(config)
    _check_whole_vocabulary(config)
    _check_router_replay(config)
    buffer, longest = config.reward.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > longest:
        raise UserError(
            f"reward.overlong_buffer_tokens={buffer} is more than rollout.max_response_tokens={longest}: the penalty "
            "begins that many tokens before the longest response; lower it"
        )


def _check_groups(config: MegarlConfig) -> None:
    algorithm, samples = config.algorithm, config.loop.samples_per_prompt
    if samples < ADVANTAGES[algorithm.advantage].smallest_group:
        raise UserError(
            f"loop.samples_per_prompt={samples} with algorithm.advantage={algorithm.advantage}, which compares the "
            "responses to one prompt with each other: in a group of one there is nothing to compare, so nothing would "
            "be learned; use 2 or more"
        )
    for key in ("dynamic_sampling", "filter_groups"):
        if getattr(algorithm, key) and samples < 2:
            raise UserError(
                f"algorithm.{key} looks for prompts whose responses differ in reward, and with "
                "loop.samples_per_prompt=1 there are none: use 2 or more samples, or turn it off"
            )


def _check_filter(config: MegarlConfig) -> None:
    algorithm, functions = config.algorithm, config.reward.functions
    # The parts of a single reward function are known only after it has scored.
    if not (algorithm.dynamic_sampling or algorithm.filter_groups) or not functions:
        return
    known = ["outcome", "reward", *functions]
    if algorithm.filter_on not in known and algorithm.filter_on.split("/")[0] not in functions:
        raise UserError(
            f"algorithm.filter_on={algorithm.filter_on} is none of {', '.join(known)}, nor a part of one of reward."
            "functions (NAME/PART): name one of these"
        )


def _check_auxiliary(config: MegarlConfig) -> None:
    advantage = config.algorithm.advantage
    sources = ADVANTAGES[advantage].sources
    if Source.CRITIC not in sources and (key := _first_set(config.critic)):
        critics = ", ".join(name for name, each in ADVANTAGES.items() if Source.CRITIC in each.sources)
        raise UserError(
            f"critic.{key} is set, but algorithm.advantage={advantage} has no critic, so nothing would train a value "
            f"loss: leave it out, or use algorithm.advantage={critics}"
        )
    if Source.IMPLICIT_REWARD_MODEL in sources and (key := _first_set(config.reward_model)):
        advice = f"set implicit_reward_model.{key}" if hasattr(config.implicit_reward_model, key) else "leave it out"
        raise UserError(
            f"reward_model.{key} is set, which is for a frozen reward model, but algorithm.advantage={advantage} learns"
            f" an implicit one in its place: {advice}"
        )
    if Source.NAMED_REWARDS in sources and len(config.reward.functions) < 2:
        raise UserError(
            f"algorithm.advantage={advantage} normalises several rewards apart, but there is one: name two or more in "
            "reward.functions"
        )


def _check_teachers(config: MegarlConfig) -> None:
    advantage, coefficient = config.algorithm.advantage, config.algorithm.distillation_coefficient
    alone = Source.TEACHERS in ADVANTAGES[advantage].sources
    asks = f"advantage={advantage}" if alone else f"distillation_coefficient={coefficient}"
    if (alone or coefficient) and not config.teachers:
        raise UserError(f"algorithm.{asks} needs a teacher: give teachers.NAME.path=...")
    if config.teachers and not alone and not coefficient:
        raise UserError(
            f"teachers are given, but algorithm.advantage={advantage} does not learn from any: set "
            "algorithm.advantage=distillation to learn from them alone, algorithm.distillation_coefficient above 0 to "
            "add them to the reward's advantages, or leave teachers out"
        )
    if coefficient and (alone or advantage == "win_rate"):
        raise UserError(
            f"algorithm.distillation_coefficient={coefficient} adds to the advantages of a reward, but algorithm."
            f"advantage={advantage} {'is the teachers alone' if alone else 'is a rate of wins'}: choose another "
            "advantage, or leave it out"
        )


def _check_kl(config: MegarlConfig) -> None:
    algorithm = config.algorithm
    if PolicyObjective(algorithm).has_kl_in("reward") and not ADVANTAGES[algorithm.advantage].reads_token_rewards:
        raise UserError(
            f"algorithm.kl_in=reward with algorithm.advantage={algorithm.advantage}, which does not read rewards of "
            "single tokens, so the KL would be lost: use kl_in=loss"
        )


def _check_interpolation(config: MegarlConfig) -> None:
    if config.algorithm.ratio_to == "interpolated" and not config.schedule.max_staleness:
        raise UserError(
            "algorithm.ratio_to=interpolated estimates the old policy by the age of tokens, and with schedule."
            "max_staleness=0 none has any: the estimate would be the engine itself, and every correction 1; use "
            "ratio_to=old for corrections that weigh, ratio_to=rollout for ratios to the engine, or max_staleness "
            "above 0"
        )


def _check_self_play(config: MegarlConfig) -> None:
    algorithm = config.algorithm
    if (algorithm.policy_loss == "sppo") != (algorithm.advantage == "win_rate"):
        raise UserError(
            f"algorithm.policy_loss={algorithm.policy_loss} with algorithm.advantage={algorithm.advantage}: SPPO "
            "learns win rates, and they are for it alone: set policy_loss=sppo and advantage=win_rate, or neither"
        )
    if algorithm.refresh_reference_every and not PolicyObjective(algorithm).needs_reference:
        raise UserError(
            f"algorithm.refresh_reference_every={algorithm.refresh_reference_every}, but nothing refers to a reference "
            "model: set algorithm.kl_coefficient above 0, or leave it out"
        )


def _check_ranges(config: MegarlConfig) -> None:
    advantage, reward = config.algorithm.advantage, config.reward
    estimator = ADVANTAGES[advantage]
    if estimator.rewards is Rewards.ANY:
        return
    has_kl = PolicyObjective(config.algorithm).has_kl_in("reward")
    subtracts_kl = has_kl and estimator.rewards is Rewards.NOT_NEGATIVE
    below_zero = {
        "reward.overlong_buffer_tokens": reward.overlong_buffer_tokens and reward.overlong_penalty,
        "reward_model.path": config.reward_model.path and config.reward_model.weight,
        "algorithm.kl_in=reward": subtracts_kl,
        **{f"reward.functions.{name}.weight below 0": term.weight < 0 for name, term in reward.functions.items()},
    }
    for key, set_ in below_zero.items():
        if set_:
            raise UserError(
                f"algorithm.advantage={advantage} needs {estimator.rewards.value}, and {key} makes rewards below 0,"
                " which would end the run at the first one: leave it out, or choose another advantage"
            )


_ALL_TOKENS = {"top_p": 1.0, "top_k": -1}
"""With these values, the engine samples from the whole vocabulary."""


def _check_whole_vocabulary(config: MegarlConfig) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    cut = {name: getattr(rollout, name) for name, all_ in _ALL_TOKENS.items() if getattr(rollout, name) != all_}
    asked = {
        "corrections": bool(algorithm.corrections),
        "off_policy_mask": algorithm.off_policy_mask is not None,
        "kl_unbiased": algorithm.kl_unbiased,
        "ratio_to=rollout": algorithm.ratio_to == "rollout",
        "updates_per_step above 1": algorithm.updates_per_step > 1,
    }
    for name, value in cut.items():
        for key, is_set in asked.items():
            if is_set:
                who, instead = f"algorithm.{key}", "leave the former out"
                if key == "corrections" and is_corrected_by_schedule(config):
                    who, instead = _set_by_schedule(config.schedule.max_staleness)
                raise UserError(
                    f"{who} with rollout.{name}={value}: the engine's log-probs are of the tokens that it"
                    " kept, the trainer's of the whole vocabulary, so ratios would be of two different distributions,"
                    " and sequence weights of long responses would vanish; sample from all tokens with rollout."
                    f"{name}={_ALL_TOKENS[name]}, or {instead}"
                )


def _set_by_schedule(max_staleness: int) -> tuple[str, str]:
    """Who has set the corrections, and how to do without; more than one version of staleness is refused without any."""
    lower = "" if max_staleness == 1 else "schedule.max_staleness=1 and "
    who = f"algorithm.corrections, which schedule.max_staleness={max_staleness} turns on,"
    return who, f"do without with {lower}schedule.corrected=false"


def _check_router_replay(config: MegarlConfig) -> None:
    if config.algorithm.router_replay == "none":
        return
    key = f"algorithm.router_replay={config.algorithm.router_replay}"
    engine = ENGINES[config.rollout.engine]
    asked_for = engine.returning_experts
    if asked_for is None:
        able = ", ".join(name for name, kind in ENGINES.items() if kind.returning_experts is not None)
        raise UserError(
            f"{key} needs engines that say which experts a token went to, and rollout.engine={config.rollout.engine}"
            f" does not: use one of {able}, or router_replay=none"
        )
    if config.loop.shared_prefixes:
        raise UserError(
            f"{key} and loop.shared_prefixes=true: an engine may send the tokens of a prompt to other experts for each"
            " response, and the trainer would compute them once; leave out one of the two"
        )
    for name, value in asked_for.items():
        if config.rollout.engine_args.get(name, value) != value:
            raise UserError(
                f"rollout.engine_args.{name}={config.rollout.engine_args[name]} contradicts {key}: leave it out"
            )
    engine.check({**config.rollout.engine_args, **asked_for})
    if config.megatron.get("moe_router_fusion"):
        raise UserError(
            f"megatron.moe_router_fusion chooses the experts within a kernel, and {key} needs others: leave it out"
        )


def _first_set(group: CriticConfig | RewardModelConfig) -> str | None:
    default = type(group)()
    changed = (each.name for each in fields(group) if getattr(group, each.name) != getattr(default, each.name))
    return next(changed, None)
