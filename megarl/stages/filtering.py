"""Choose the groups to train on: dynamic sampling replaces groups, the group filter leaves them out."""

from collections.abc import Collection, Sequence

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES
from megarl.data import PromptGroup, Trajectory, trajectories_of
from megarl.rewards import OVERLONG, REWARD_MODEL
from megarl.schema import AlgorithmConfig, MegarlConfig
from megarl.stages.batch import is_trained_on

_SHAPING = (OVERLONG, REWARD_MODEL)
"""Reward terms that differ between nearly any two responses, even if both are right or both wrong."""


def groups_to_train_on(groups: Sequence[PromptGroup], config: AlgorithmConfig) -> list[PromptGroup]:
    """Drop trajectories without a score, then groups that are not to be trained on.

    With `dynamic_sampling` (DAPO, arXiv:2503.14476, section 3.2) only groups that teach something stay, possibly none.
    The same holds with `filter_groups` (ScaleRL's zero-variance filter, arXiv:2510.13786), except that all groups stay
    if none teaches.

    Raises UserError if no response's reward has the number `filter_on`.
    """
    scored = [group for group in (each.only_scored() for each in groups) if group.trajectories]
    if not config.dynamic_sampling and not config.filter_groups:
        return scored
    teaching = [group for group in scored if teaches(group, config)]
    return teaching if teaching or config.dynamic_sampling else scored


def without_small_groups(groups: Sequence[PromptGroup], config: AlgorithmConfig) -> list[PromptGroup]:
    """Drop trajectories that do not enter the statistics, then groups too small for the advantage estimator.

    A group is small because rewards failed, or because responses were truncated and
    `truncated_responses_in_statistics` is off.

    Raises UserError if no group is left.
    """
    smallest = ADVANTAGES[config.advantage].smallest_group
    kept = [group for each in groups if len((group := _compared(each, config)).trajectories) >= smallest]
    if not kept:
        scored = trajectories_of(groups)
        raise UserError(
            f"no prompt of this step has {smallest} {'responses' if smallest > 1 else 'response'} to learn from: of"
            f" the {len(scored)} that were scored {sum(each.is_truncated for each in scored)} were truncated at"
            " rollout.max_response_tokens, and those whose reward failed had been dropped; raise"
            " rollout.max_response_tokens, or repair reward.function"
        )
    return kept


def teaches(group: PromptGroup, config: AlgorithmConfig) -> bool:
    """Whether the responses differ in `filter_on` and its mean lies in [`filter_low`, `filter_high`].

    Only responses that enter the statistics count. A group without a response to train on teaches nothing.

    DAPO filters by accuracy (arXiv:2503.14476, equation 11; its runs set filter_groups.metric=acc). A filter on the
    whole reward would keep a group of right answers that differ only in their length penalty, and GRPO's normalization
    would scale that penalty up to advantages of the usual size. The band is PRIME's (arXiv:2502.01456, online prompt
    filtering).
    """
    compared = _compared(group, config)
    if not any(is_trained_on(each, config) for each in compared.trajectories):
        return False
    values = _measured(compared, config.filter_on)
    mean = sum(values) / len(values)
    low, high = config.filter_low, config.filter_high
    return min(values) < max(values) and (low is None or mean >= low) and (high is None or mean <= high)


def left_out(sampled: Sequence[PromptGroup], trained: Sequence[PromptGroup]) -> float:
    """Share of the scored groups that are not trained on: they teach nothing, or have too few responses."""
    return 1 - len(trained) / sum(bool(group.only_scored().trajectories) for group in sampled)


def check_refills(kept: Collection[PromptGroup], dropped: Sequence[PromptGroup], config: MegarlConfig) -> None:
    """Raise UserError if more than `algorithm.max_refills` x `loop.prompts_per_step` prompts were dropped."""
    algorithm, wanted = config.algorithm, config.loop.prompts_per_step
    if len(dropped) <= algorithm.max_refills * wanted:
        return
    rewards = [reward for group in (*kept, *dropped) for reward in group.only_scored().rewards]
    bounds = {"filter_low": algorithm.filter_low, "filter_high": algorithm.filter_high}
    band = "".join(f", {name}={bound:g}" for name, bound in bounds.items() if bound is not None)
    mean = f"; the mean reward is {sum(rewards) / len(rewards):.3g}" if rewards else ""
    raise UserError(
        f"of {len(kept) + len(dropped)} prompts only {len(kept)} of the {wanted} of a step have responses that differ "
        f"(algorithm.filter_on={algorithm.filter_on}{band}{mean}): the prompts are too easy "
        "or too hard for the policy; change the data, "
        "raise loop.samples_per_prompt or algorithm.max_refills, or set algorithm.dynamic_sampling=false"
    )


def _compared(group: PromptGroup, config: AlgorithmConfig) -> PromptGroup:
    """The group without trajectories that do not enter its statistics."""
    if config.truncated_responses_in_statistics:
        return group
    return group.with_members([each for each in group.trajectories if is_trained_on(each, config)])


def _measured(group: PromptGroup, name: str) -> list[float]:
    """The number `name` of each response's reward; 0 for responses that timed out or could not be decided."""
    decided = [_numbers(each) for each in group.trajectories if _is_decided(each)]
    if decided and all(name not in each for each in decided):
        raise UserError(
            f"algorithm.filter_on={name} is no number of the reward of a response to {group.prompt.data_source}, which"
            f" has {', '.join(decided[0])}: name one of these"
        )
    return [_numbers(each).get(name, 0.0) for each in group.trajectories]


def _numbers(trajectory: Trajectory) -> dict[str, float]:
    score = trajectory.scored
    outcome = sum(value for term, value in score.terms.items() if term not in _SHAPING)
    return {**score.parts, **score.terms, "outcome": outcome, "reward": score.value}


def _is_decided(trajectory: Trajectory) -> bool:
    return trajectory.failure is None and trajectory.scored.is_decided
