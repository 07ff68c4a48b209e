"""Reading what scoring some samples gave."""

from collections.abc import Sequence

from megarl.rewards import Outcome, RewardTimedOut, Score


def values(outcomes: Sequence[Outcome]) -> list[float | None]:
    """The scores' values, None of what failed."""
    return [each.value if isinstance(each, Score) else None for each in outcomes]


def failures(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """How many samples failed, and how many timed out."""
    timed_out = sum(isinstance(each, RewardTimedOut) for each in outcomes)
    return sum(not isinstance(each, Score) for each in outcomes) - timed_out, timed_out
