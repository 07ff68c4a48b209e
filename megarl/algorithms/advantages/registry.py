"""The advantage estimators by name, and how one is asked."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages import group_ranks, group_rewards, process_rewards, returns, whitening
from megarl.algorithms.advantages.estimator import INPUTS, Estimator, ScoredResponses, Source, given
from megarl.algorithms.advantages.token_baseline import optimal_token_baseline
from megarl.algorithms.advantages.whitening import whiten_
from megarl.algorithms.finite import check_finite
from megarl.algorithms.parts import lookup
from megarl.algorithms.ragged import empty

ADVANTAGES: Mapping[str, Estimator] = {
    "gae": Estimator(returns.gae, needs=frozenset({"values"}), whitened=True),
    "grpo": Estimator(group_rewards.grpo, smallest_group=2, of_response=True),
    "rloo": Estimator(group_rewards.rloo, smallest_group=2, of_response=True),
    "reinforce_plus_plus": Estimator(returns.reinforce_plus_plus, whitened=True),
    "reinforce_plus_plus_baseline": Estimator(
        whitening.reinforce_plus_plus_baseline, smallest_group=2, of_response=True
    ),
    "remax": Estimator(returns.remax, needs=frozenset({"baseline_rewards"})),
    "opo": Estimator(group_rewards.opo, smallest_group=2, of_response=True),
    "gpg": Estimator(group_rewards.gpg, smallest_group=2, of_response=True),
    "grpo_pass_k": Estimator(group_ranks.grpo_pass_k, smallest_group=2, of_response=True),
    "gdpo": Estimator(whitening.gdpo, needs=frozenset({"parts"}), smallest_group=2, reads_kl=False, of_response=True),
    "max_rl": Estimator(group_rewards.max_rl, smallest_group=2, of_response=True),
    "prime": Estimator(process_rewards.prime, needs=frozenset({"process_rewards"}), smallest_group=2),
    "optimal_token_baseline": Estimator(
        optimal_token_baseline, needs=frozenset({"old_log_probs", "probability_squares"})
    ),
    "win_rate": Estimator(group_ranks.win_rate, smallest_group=2, of_response=True),
    "distillation": Estimator(
        process_rewards.distillation, needs=frozenset({"old_log_probs", "teacher_log_probs"}), reads_kl=False
    ),
}


def estimate(
    name: str,
    scored: ScoredResponses,
    options: Mapping[str, Any] = MappingProxyType({}),
    describe: Callable[[int], str] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The advantages float[T] of the estimator `name` with `options` of its own, and what a critic learns from them.

    See `estimate_compact`.
    """
    advantages, targets = estimate_compact(name, scored, options, describe)
    return scored.responses.spread(advantages) if ADVANTAGES[name].of_response else advantages, targets


def estimate_compact(
    name: str,
    scored: ScoredResponses,
    options: Mapping[str, Any] = MappingProxyType({}),
    describe: Callable[[int], str] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `estimate`, but with one advantage for each response, float[N], where the estimator is `of_response`.

    A critic learns the return at each token, R_t = A_t + V_t of the advantages before whitening, float[T], as in PPO
    for language models (arXiv:2203.02155) and verl. Without a critic there is none.

    `describe` is what messages call the i-th response. Raises UserError for a name that is not known, a field that the
    estimator needs and the run does not have, no trained token at all, a group smaller than the estimator can do
    with, and a value that is not a finite number.
    """
    estimator = lookup(ADVANTAGES, "algorithm.advantage", name)
    _check_complete(name, estimator, scored)
    _check_numbers(scored, describe or (lambda i: f"response {i} to prompt {int(scored.groups[i])}"))
    advantages = estimator.function(scored, **options)
    targets = None
    if estimator.of_response:
        return advantages.to(scored.rewards.dtype), targets
    if Source.CRITIC in estimator.sources:
        targets = torch.add(advantages, given(scored.values), out=empty(len(advantages), advantages))
    return whiten_(advantages) if estimator.whitened else advantages, targets


def _check_complete(name: str, estimator: Estimator, scored: ScoredResponses) -> None:
    for field in sorted(estimator.needs):
        if not _present(getattr(scored, field)):
            raise UserError(
                f"algorithm.advantage={name} needs {_source(field)}, which this run does not have: configure it, "
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
    for field, each in INPUTS.items():
        values, responses = getattr(scored, field), scored.responses if each.per_token else None
        named = (
            {f"{each.word} {name!r}": part for name, part in values.items()}
            if field == "parts"
            else {each.word: values}
        )
        for what, numbers in named.items():
            if numbers is not None:
                check_finite(what, numbers, describe, responses)


def _present(field: Tensor | Mapping[str, Tensor] | None) -> bool:
    return field is not None and len(field) > 0


def _source(field: str) -> str:
    source = INPUTS[field].source
    return field if source is None else source.value
