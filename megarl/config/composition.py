"""Whether the parts of an algorithm go together."""

from dataclasses import fields

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES, PolicyObjective
from megarl.algorithms.compatibility import check_algorithm
from megarl.config.schema import CriticConfig, MegarlConfig


def check_composition(config: MegarlConfig) -> None:
    """Raise UserError for the first two parts that don't go together, or a part without what it needs."""
    check_algorithm(config.algorithm)
    _check_groups(config)
    _check_companions(config)
    _check_kl(config)
    _check_self_play(config)
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
    if algorithm.dynamic_sampling and samples < 2:
        raise UserError(
            "algorithm.dynamic_sampling looks for prompts whose responses differ in reward, and with "
            "loop.samples_per_prompt=1 there are none: use 2 or more samples, or turn it off"
        )


def _check_companions(config: MegarlConfig) -> None:
    advantage = config.algorithm.advantage
    needs = ADVANTAGES[advantage].needs
    if "values" not in needs and (key := _first_set(config.critic)):
        critics = ", ".join(name for name, each in ADVANTAGES.items() if "values" in each.needs)
        raise UserError(
            f"critic.{key} is set, but algorithm.advantage={advantage} has no critic, so nothing would train a value "
            f"loss: leave it out, or use algorithm.advantage={critics}"
        )
    if "teacher_log_probs" in needs and not config.teachers:
        raise UserError(f"algorithm.advantage={advantage} needs a teacher: give teachers.NAME.path=...")
    if config.teachers and "teacher_log_probs" not in needs:
        raise UserError(
            f"teachers are given, but algorithm.advantage={advantage} does not learn from any: set "
            "algorithm.advantage=distillation, or leave teachers out"
        )
    if "parts" in needs and len(config.reward.functions) < 2:
        raise UserError(
            f"algorithm.advantage={advantage} normalises several rewards apart, but there is one: name two or more in "
            "reward.functions"
        )


def _check_kl(config: MegarlConfig) -> None:
    algorithm = config.algorithm
    if PolicyObjective(algorithm).has_kl_in("reward") and not ADVANTAGES[algorithm.advantage].reads_kl:
        raise UserError(
            f"algorithm.kl_in=reward with algorithm.advantage={algorithm.advantage}, which does not read rewards of "
            "single tokens, so the KL would be lost: use kl_in=loss"
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


def _first_set(critic: CriticConfig) -> str | None:
    default = CriticConfig()
    changed = (each.name for each in fields(critic) if getattr(critic, each.name) != getattr(default, each.name))
    return next(changed, None)
