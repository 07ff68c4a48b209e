"""The advantage estimators by name, and how one is asked."""

from collections.abc import Callable, Mapping

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages.estimator import Estimator
from megarl.algorithms.advantages.group_rewards import grpo
from megarl.algorithms.advantages.scored import Advantages, ScoredResponses
from megarl.algorithms.finite import check_finite
from megarl.algorithms.registry import lookup
from megarl.config.schema import AlgorithmConfig

ADVANTAGES: Mapping[str, Estimator] = {"grpo": Estimator(grpo, smallest_group=2)}

# Fields of ScoredResponses that may hold values which are not numbers, and what a message calls one of them.
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
    name: str, scored: ScoredResponses, config: AlgorithmConfig, called: Callable[[int], str] | None = None
) -> Advantages:
    """The advantages of the estimator `name`, with the options of `config` that it names.

    `called` is what messages call the i-th response. Raises UserError for a name that is not known, a field that the
    estimator needs and the run does not have, no trained token at all, a group smaller than the estimator can do
    with, and a value that is not a finite number.
    """
    estimator = lookup(ADVANTAGES, "algorithm.advantage", name)
    _check(name, estimator, scored, called or (lambda i: f"response {i} to prompt {int(scored.groups[i])}"))
    return estimator.function(scored, **{option: getattr(config, option) for option in estimator.options})


def _check(name: str, estimator: Estimator, scored: ScoredResponses, called: Callable[[int], str]) -> None:
    if not scored.responses.tokens:
        raise UserError("no response of this step has a token to train on: check the rollout and the reward function")
    for field in sorted(estimator.needs):
        if not _present(getattr(scored, field)):
            raise UserError(f"algorithm.advantage={name} needs {field.replace('_', ' ')}, which this run does not have")
    if int(scored.prompts.sizes.min()) < estimator.smallest_group:
        raise UserError(
            f"algorithm.advantage={name} compares the responses to one prompt with each other, but a prompt has only "
            "one response: raise loop.samples_per_prompt to at least 2 (with reward.on_error=drop, failed rewards make "
            "groups smaller)"
        )
    for field, what in _PER_RESPONSE.items():
        _check_field(what, getattr(scored, field), called)
    for part, values in scored.parts.items():
        check_finite(f"reward {part}", values, called)
    for field, what in _PER_TOKEN.items():
        if (values := getattr(scored, field)) is not None:
            check_finite(what, values, called, scored.responses)


def _check_field(what: str, values: Tensor | None, called: Callable[[int], str]) -> None:
    if values is not None:
        check_finite(what, values, called)


def _present(field: object) -> bool:
    return field is not None and field != {}
