"""Rollout and reward, once, or until enough prompts have responses that teach something."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from converters.errors import UserError
from megarl.data import Trajectory
from megarl.schema import MegarlConfig
from megarl.stages.filtering import groups_of, teaching_groups
from megarl.stages.sample import Experience


@dataclass(frozen=True)
class Gathered:
    """The responses of a step."""

    trajectories: list[Trajectory]
    """Trajectories to train on; the responses to one prompt share a `group`."""
    experience: Experience
    """All that were sampled."""
    rollouts: int
    """How often the engines were asked."""
    left_out: float = 0.0
    """Share of the groups that were sampled and are not trained on, as they teach nothing."""


def gather(sample: Callable[[int, int], Experience], config: MegarlConfig) -> Gathered:
    """The responses of a step; `sample(count, refill)` gives those to `count` prompts, for the first time or again.

    With `algorithm.dynamic_sampling` (DAPO, arXiv:2503.14476, section 3.2) groups that teach nothing are replaced:
    further rollouts sample as many prompts as are missing. With `algorithm.filter_groups` they are left out without
    others in their place (ScaleRL's zero-variance filter, arXiv:2510.13786), unless no group would be left: then all
    stay.

    Raises UserError if prompts are still missing after `algorithm.max_refills` further rollouts.
    """
    algorithm, wanted = config.algorithm, config.loop.prompts_per_step
    rounds = [sample(wanted, 0)]
    if not algorithm.dynamic_sampling and not algorithm.filter_groups:
        return Gathered(rounds[0].scored, rounds[0], rollouts=1)
    kept = teaching_groups(rounds[0].scored, algorithm)
    while algorithm.dynamic_sampling and len(kept) < wanted:
        if len(rounds) > algorithm.max_refills:
            raise UserError(_too_few(len(kept), rounds, config))
        rounds.append(sample(wanted - len(kept), len(rounds)))
        kept += teaching_groups(rounds[-1].scored, algorithm)
    kept = kept or groups_of(rounds[0].scored)
    found = sum(len(groups_of(part.scored)) for part in rounds)
    trajectories = [replace(each, group=group) for group, members in enumerate(kept) for each in members]
    return Gathered(trajectories, _together(rounds), len(rounds), left_out=1 - len(kept) / found)


def _together(rounds: Sequence[Experience]) -> Experience:
    """All rounds as one, with groups of their own."""
    first = [sum(_groups(earlier) for earlier in rounds[:number]) for number in range(len(rounds))]
    return Experience(
        scored=[
            replace(t, group=t.group + start) for part, start in zip(rounds, first, strict=True) for t in part.scored
        ],
        sampled=[trajectory for part in rounds for trajectory in part.sampled],
        failed=sum(part.failed for part in rounds),
        timed_out=sum(part.timed_out for part in rounds),
    )


def _groups(part: Experience) -> int:
    return 1 + max(trajectory.group for trajectory in part.sampled)


def _too_few(kept: int, rounds: Sequence[Experience], config: MegarlConfig) -> str:
    algorithm = config.algorithm
    rewards = [trajectory.reward for part in rounds for trajectory in part.scored]
    bounds = {"filter_low": algorithm.filter_low, "filter_high": algorithm.filter_high}
    band = "".join(f", {name}={bound:g}" for name, bound in bounds.items() if bound is not None)
    return (
        f"after {len(rounds)} rollouts of {sum(map(_groups, rounds))} prompts only {kept} of the "
        f"{config.loop.prompts_per_step} of this step have responses that differ (algorithm.filter_on="
        f"{algorithm.filter_on}{band}; the mean reward is {sum(rewards) / len(rewards):.3g}): the prompts are too easy "
        "or too hard for the policy; change the data, raise loop.samples_per_prompt or algorithm.max_refills, or set "
        "algorithm.dynamic_sampling=false"
    )
