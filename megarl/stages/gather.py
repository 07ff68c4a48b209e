"""Rollout and reward, once, or until enough prompts have responses that differ in reward."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from converters.errors import UserError
from megarl.config.schema import MegarlConfig
from megarl.data import Trajectory
from megarl.stages.sample import Experience


@dataclass(frozen=True)
class Gathered:
    """The responses of a step."""

    trajectories: list[Trajectory]
    """Those to train on; the responses to one prompt share a `group`."""
    experience: Experience
    """All that were sampled."""
    rollouts: int
    """How often the engines were asked."""


def gather(sample: Callable[[int, int], Experience], config: MegarlConfig) -> Gathered:
    """The responses of a step; `sample(count, refill)` gives those to `count` prompts, for the first time or again.

    With `algorithm.dynamic_sampling` (DAPO, arXiv:2503.14476, section 3.2) prompts whose responses all have the same
    reward, which teach nothing, are replaced: further rollouts sample as many prompts as are missing.

    Raises UserError if prompts are still missing after `algorithm.max_refills` further rollouts.
    """
    wanted, limit = config.loop.prompts_per_step, config.algorithm.max_refills
    rounds = [sample(wanted, 0)]
    if not config.algorithm.dynamic_sampling:
        return Gathered(rounds[0].scored, rounds[0], rollouts=1)
    kept = differing_groups(rounds[0].scored)
    while len(kept) < wanted:
        if len(rounds) > limit:
            raise UserError(_too_few(len(kept), rounds, wanted))
        rounds.append(sample(wanted - len(kept), len(rounds)))
        kept += differing_groups(rounds[-1].scored)
    trajectories = [replace(each, group=group) for group, members in enumerate(kept) for each in members]
    return Gathered(trajectories, _together(rounds), len(rounds))


def differing_groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The groups whose responses don't all have the same reward."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    return [members for members in groups.values() if len({member.reward for member in members}) > 1]


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


def _too_few(kept: int, rounds: Sequence[Experience], wanted: int) -> str:
    rewards = [trajectory.reward for part in rounds for trajectory in part.scored]
    return (
        f"after {len(rounds)} rollouts of {sum(map(_groups, rounds))} prompts only {kept} of the {wanted} of this step "
        f"have responses that differ in reward (the mean reward is {sum(rewards) / len(rewards):.3g}): the prompts are "
        "too easy or too hard for the policy; change the data, raise loop.samples_per_prompt or algorithm.max_refills, "
        "or set algorithm.dynamic_sampling=false"
    )
