"""The advantage estimators by name, and how one is asked."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages import group_ranks, group_rewards, process_rewards, returns, whitened_rewards
from megarl.algorithms.advantages.estimator import Estimator
from megarl.algorithms.advantages.scored import Advantages, ScoredResponses
from megarl.algorithms.advantages.token_baseline import optimal_token_baseline
from megarl.algorithms.finite import check_finite
from megarl.algorithms.parts import lookup

ADVANTAGES: Mapping[str, Estimator] = {
    "gae": Estimator(returns.gae, needs=frozenset({"values"})),
    "grpo": Estimator(group_rewards.grpo, smallest_group=2),
    "rloo": Estimator(group_rewards.rloo, smallest_group=2),
    "reinforce_plus_plus": Estimator(returns.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(whitened_rewards.reinforce_plus_plus_baseline, smallest_group=2),
    "remax": Estimator(returns.remax, needs=frozenset({"baseline_rewards"})),
    "opo": Estimator(group_rewards.opo, smallest_group=2),
    "gpg": Estimator(group_rewards.gpg, smallest_group=2),
    "grpo_pass_k": Estimator(group_ranks.grpo_pass_k, smallest_group=2),
    "gdpo": Estimator(whitened_rewards.gdpo, needs=frozenset({"parts"}), smallest_group=2, reads_kl=False),
    "max_rl": Estimator(group_rewards.max_rl, smallest_group=2),
    "prime": Estimator(process_rewards.prime, needs=frozenset({"process_rewards"}), smallest_group=2),
    "optimal_token_baseline": Estimator(
        optimal_token_baseline, needs=frozenset({"old_log_probs", "probability_squares"})
    ),
    "win_rate": Estimator(group_ranks.win_rate, smallest_group=2),
    "distillation": Estimator(
        process_rewards.distillation, needs=frozenset({"old_log_probs", "teacher_log_probs"}), reads_kl=False
    ),
}

# Source in a run of each field of ScoredResponses that an estimator may need.
_COMES_FROM = {
    "values": "the values of a critic",
    "baseline_rewards": "the rewards of greedy responses",
    "parts": "several named rewards (reward.functions)",
    "process_rewards": "an implicit reward model (reward_model.path)",
    "teacher_log_probs": "the log-probs of a teacher (teachers)",
    "old_log_probs": "the log-probs of the policy before the update",
    "probability_squares": "the sums of squared probabilities of the policy before the update",
}

# Fields of values that may not be numbers, and what a message calls one of them.
_PER_RESPONSE = {"rewards": "reward", "baseline_rewards": "reward of the greedy response"}
_PER_TOKEN = {
    "token_rewards": "reward",
    "values": "value",
    "old_log_probs": "log-prob",
    "probability_squares": "sum of squared probabilities",
    "importance_weights": "importance weight",
    "process_rewards": "process reward",
    "teacher_log_probs": "teacher's log-prob",
}


def estimate(
    name: str,
    scored: ScoredResponses,
    options: Mapping[str, Any] = MappingProxyType({}),
    describe: Callable[[int], str] | None = None,
) -> Advantages:
    """The advantages of the estimator `name` with `options` of its own.

    `describe` is what messages call the i-th response. Raises UserError for a name that is not known, a field that the
    estimator needs and the run does not have, no trained token at all, a group smaller than the estimator can do
    with, and a value that is not a finite number.
    """
    estimator = lookup(ADVANTAGES, "algorithm.advantage", name)
    _check_complete(name, estimator, scored)
    _check_numbers(scored, describe or (lambda i: f"response {i} to prompt {int(scored.groups[i])}"))
    return estimator.function(scored, **options)


def _check_complete(name: str, estimator: Estimator, scored: ScoredResponses) -> None:
    for field in sorted(estimator.needs):
        if not _present(getattr(scored, field)):
            raise UserError(
                f"algorithm.advantage={name} needs {_COMES_FROM[field]}, which this run does not have: configure it, "
                "or choose another advantage"
            )
    if not scored.responses.tokens:
        raise UserError("no response of this step has a token to train on: check the rollout and the reward function")
    if int(scored.prompts.sizes.min()) < estimator.smallest_group:
        raise UserError(
            f"algorithm.advantage={name} compares the responses to one prompt with each other, but a prompt has only "
            "one response: raise loop.samples_per_prompt to at least 2 (with reward.on_error=drop, failed rewards make "
            "groups smaller)"
        )


def _check_numbers(scored: ScoredResponses, describe: Callable[[int], str]) -> None:
    per_response = {what: getattr(scored, field) for field, what in _PER_RESPONSE.items()}
    per_response |= {f"reward {name!r}": values for name, values in scored.parts.items()}
    per_token = {field: (what, getattr(scored, field)) for field, what in _PER_TOKEN.items()}
    for what, values in per_response.items():
        if values is not None:
            check_finite(what, values, describe)
    for what, values in per_token.values():
        if values is not None:
            check_finite(what, values, describe, scored.responses)


def _present(field: Tensor | Mapping[str, Tensor] | None) -> bool:
    return field is not None and len(field) > 0
