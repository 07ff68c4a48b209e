"""Checks that the engine supports what the schedule and the algorithm need."""

from collections.abc import Iterator
from typing import NamedTuple

from converters.errors import UserError
from megarl.rollout import engine_kind
from megarl.rollout.kind import Ability
from megarl.schema import MegarlConfig


class _Need(NamedTuple):
    """A choice that needs an ability of the engine, and what to choose without it."""

    choice: str
    ability: Ability
    instead: str


def check_abilities(config: MegarlConfig) -> None:
    """Raise UserError for a choice that needs an ability that engines of this kind lack."""
    kind = engine_kind(config.rollout.engine)
    for need in _needs(config):
        if need.ability not in kind.offers:
            raise UserError(
                f"{need.choice} has engines {need.ability.value}, and {kind.title} does not: {need.instead}, or choose"
                " another rollout.engine"
            )


def _needs(config: MegarlConfig) -> Iterator[_Need]:
    schedule, algorithm = config.schedule, config.algorithm
    if schedule.in_flight == "keep":
        yield _Need("schedule.in_flight=keep", Ability.KEPT_KV, "set it to recompute")
    if schedule.max_staleness:
        # Prompts of later batches would delay those that the next batch waits for.
        yield _Need(f"schedule.max_staleness={schedule.max_staleness}", Ability.PRIORITIES, "set it to 0")
    if algorithm.corrections:
        kinds = ", ".join(each.kind for each in algorithm.corrections)
        yield _Need(f"algorithm.corrections of {kinds}", Ability.LOG_PROBS, "leave them out")
    if algorithm.ratio_to == "rollout":
        yield _Need("algorithm.ratio_to=rollout", Ability.LOG_PROBS, "set it to old")
    if algorithm.ratio_to == "interpolated":
        yield _Need("algorithm.ratio_to=interpolated", Ability.LOG_PROBS, "set it to old")
    if algorithm.off_policy_mask is not None:
        yield _Need(f"algorithm.off_policy_mask={algorithm.off_policy_mask}", Ability.LOG_PROBS, "leave it out")
    if algorithm.kl_unbiased:
        yield _Need("algorithm.kl_unbiased", Ability.LOG_PROBS, "leave it out")
    if config.refit.verify == "logprobs":
        yield _Need("refit.verify=logprobs", Ability.LOG_PROBS, "set it to checksum")
