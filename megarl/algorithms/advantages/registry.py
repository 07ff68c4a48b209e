"""The advantage estimators by name, and the checked call of one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages import group_ranks, group_rewards, process_rewards, returns, whitening
from megarl.algorithms.advantages.estimator import INPUTS, Estimator, Rewards, Source
from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.advantages.token_baseline import optimal_token_baseline
from megarl.algorithms.advantages.whitening import whiten_
from megarl.algorithms.finite import check_finite
from megarl.algorithms.parts import call, inputs_of, lookup
from megarl.algorithms.ragged import Ragged, empty

ADVANTAGES: Mapping[str, Estimator] = {
    "gae": Estimator(returns.gae, whitened=True),
    "grpo": Estimator(group_rewards.grpo, smallest_group=2, of_response=True),
    "rloo": Estimator(group_rewards.rloo, smallest_group=2, of_response=True),
    "reinforce_plus_plus": Estimator(returns.reinforce_plus_plus, whitened=True),
    "reinforce_plus_plus_baseline": Estimator(
        whitening.reinforce_plus_plus_baseline, smallest_group=2, of_response=True
    ),
    "remax": Estimator(returns.remax),
    "opo": Estimator(group_rewards.opo, smallest_group=2, of_response=True),
    "gpg": Estimator(group_rewards.gpg, smallest_group=2, of_response=True),
    "grpo_pass_k": Estimator(group_ranks.grpo_pass_k, smallest_group=2, of_response=True),
    "gdpo": Estimator(whitening.gdpo, smallest_group=2, of_response=True),
    "max_rl": Estimator(group_rewards.max_rl, smallest_group=2, of_response=True, rewards=Rewards.NOT_NEGATIVE),
    "prime": Estimator(process_rewards.prime, smallest_group=2, rewards=Rewards.OUTCOMES),
    "optimal_token_baseline": Estimator(optimal_token_baseline),
    "win_rate": Estimator(group_ranks.win_rate, smallest_group=2, of_response=True),
    "distillation": Estimator(process_rewards.distillation),
}


def estimate(
    name: str,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
    describe: Callable[[int], str] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the estimator `name`; returns advantages float[T] and the critic's targets. See `estimate_compact`."""
    advantages, targets = estimate_compact(name, inputs, options, describe)
    return inputs["responses"].spread(advantages) if ADVANTAGES[name].of_response else advantages, targets


def estimate_compact(
    name: str, inputs: Mapping[str, Any], options: Mapping[str, Any], describe: Callable[[int], str] | None
) -> tuple[Tensor, Tensor | None]:
    """Run the estimator `name`; returns its advantages, and the targets of the critic or None.

    `inputs` holds the available `INPUTS`, always `responses`, `groups` and `rewards`; an absent or None entry is not
    available. `prompts` and `scores` are derived here. `options` are the estimator's own.

    Advantages are float[N], one per response, if the estimator is `of_response`, else float[T]. Targets float[T] are
    the returns R_t = A_t + V_t, with advantages before whitening, as in PPO for language models (arXiv:2203.02155) and
    verl; None without a critic.

    `describe(i)` names the i-th response in messages. Raises UserError for an unknown name, a required input that the
    run does not have, a step without any trained token, a group that is too small for the estimator, and a value that
    is not finite.
    """
    estimator = lookup(ADVANTAGES, "algorithm.advantage", name)
    prompts = Groups.of(inputs["groups"])
    _check_complete(name, estimator, inputs, prompts)
    _check_numbers(inputs, describe or (lambda i: f"response {i} to prompt {int(inputs['groups'][i])}"))
    made: dict[str, Any] = {"prompts": prompts}
    if "scores" in inputs_of(estimator.function):
        made["scores"] = call(_scores, inputs)
    advantages = call(estimator.function, {**inputs, **made}, **options)
    targets = None
    if estimator.of_response:
        return advantages.to(inputs["rewards"].dtype), targets
    if Source.CRITIC in estimator.sources:
        targets = torch.add(advantages, inputs["values"], out=empty(len(advantages), advantages))
    return whiten_(advantages) if estimator.whitened else advantages, targets


def _scores(rewards: Tensor, responses: Ragged, token_rewards: Tensor | None = None) -> Tensor:
    scores = rewards.double()
    return scores if token_rewards is None else scores + responses.sum(token_rewards)


def _check_complete(name: str, estimator: Estimator, inputs: Mapping[str, Any], prompts: Groups) -> None:
    for field in sorted(estimator.needs):
        if not _present(inputs.get(field)):
            raise UserError(
                f"algorithm.advantage={name} needs {_source(field)}, which this run does not have: configure it, "
                "or choose another advantage"
            )
    if not inputs["responses"].tokens:
        raise UserError("no response of this step has a token to train on: check the rollout and the reward function")
    if int(prompts.sizes.min()) < estimator.smallest_group:
        raise UserError(
            f"algorithm.advantage={name} compares the responses to one prompt with each other, but a prompt has only "
            "one response: raise loop.samples_per_prompt to at least 2 (with reward.on_error=drop, failed rewards make "
            "groups smaller)"
        )


def _check_numbers(inputs: Mapping[str, Any], describe: Callable[[int], str]) -> None:
    for field, each in INPUTS.items():
        values, responses = inputs.get(field), inputs["responses"] if each.per_token else None
        if each.word is None or values is None:
            continue
        named = values.items() if field == "parts" else [(None, values)]
        for part, numbers in named:
            check_finite(each.word if part is None else f"{each.word} {part!r}", numbers, describe, responses)


def _present(field: Tensor | Mapping[str, Tensor] | None) -> bool:
    return field is not None and len(field) > 0


def _source(field: str) -> str:
    source = INPUTS[field].source
    return field if source is None else source.value
