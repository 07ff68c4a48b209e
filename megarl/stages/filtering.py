"""Which groups teach something: what dynamic sampling replaces, and what the group filter leaves out."""

from collections import defaultdict
from collections.abc import Sequence

from converters.errors import UserError
from megarl.data import Trajectory
from megarl.rewards import OVERLONG
from megarl.schema import AlgorithmConfig
from megarl.stages.sample import REWARD_MODEL

_SHAPING = (OVERLONG, REWARD_MODEL)
"""Terms that differ between nearly any two responses, right or wrong alike."""


def teaching_groups(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[list[Trajectory]]:
    """The groups whose responses differ in `filter_on`, and whose mean of it is from `filter_low` to `filter_high`.

    DAPO filters by accuracy (arXiv:2503.14476, equation 11; its runs' filter_groups.metric=acc): a group of right
    answers that differ by their length penalty alone would otherwise be kept, and GRPO would blow the penalty up to
    advantages of the usual size. The band is PRIME's (arXiv:2502.01456, online prompt filtering).

    Raises UserError for a name that no response's reward has.
    """
    return [members for members in groups_of(trajectories) if _teaches(members, config)]


def groups_of(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories by group, in the order in which the groups come."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    return list(groups.values())


def _teaches(members: Sequence[Trajectory], config: AlgorithmConfig) -> bool:
    values = [_measure(member, config.filter_on) for member in members]
    mean = sum(values) / len(values)
    low, high = config.filter_low, config.filter_high
    return min(values) < max(values) and (low is None or mean >= low) and (high is None or mean <= high)


def _measure(trajectory: Trajectory, name: str) -> float:
    score = trajectory.scored
    if name == "reward":
        return score.value
    if name == "outcome":
        return sum(value for term, value in score.terms.items() if term not in _SHAPING)
    known = {**score.parts, **score.terms}
    if name in known:
        return known[name]
    raise UserError(
        f"algorithm.filter_on={name} is no number of the reward of a response to {trajectory.prompt.data_source}, which"
        f" has {', '.join(known)}: name one of these, or outcome, or reward"
    )
