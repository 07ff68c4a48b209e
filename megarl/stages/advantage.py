"""Scored trajectories to advantages: how much better each token was than expected."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES, KL_ESTIMATORS, PolicyObjective
from megarl.algorithms.advantages import INPUTS, distillation, estimate_compact
from megarl.algorithms.corrections import correction_factor
from megarl.algorithms.finite import check_finite
from megarl.algorithms.parts import call
from megarl.algorithms.ragged import Ragged
from megarl.cluster.trainer.batch import Batch
from megarl.data import PromptGroup, Trajectory, prompt_of_each, trajectories_of
from megarl.data.stretches import not_finite
from megarl.rewards import OVERLONG, REWARD_MODEL
from megarl.schema import AlgorithmConfig, MegarlConfig
from megarl.stages.batch import (
    at_responses,
    at_trained,
    at_trained_tokens,
    group_of_each,
    trained_responses,
)
from megarl.stages.fields import with_fields


def kl_in_reward(batch: Batch, objective: PolicyObjective) -> Tensor | None:
    """Estimate KL(old policy || reference) at each trained token; None unless it is part of the reward."""
    if not objective.has_kl_in("reward"):
        return None
    old, reference = (at_trained(f"{name}_log_probs", batch) for name in ("old", "reference"))
    return KL_ESTIMATORS[objective.algorithm.kl_estimator](old, reference)


def kl_to_teachers(batch: Batch) -> float | None:
    """Estimate the old policy's KL to its teachers, averaged over the trained tokens; None without teachers."""
    if "teacher_log_probs" not in batch.fields:
        return None
    return -float((at_trained("teacher_log_probs", batch) - at_trained("old_log_probs", batch)).mean())


def with_advantages(
    batch: Batch,
    groups: Sequence[PromptGroup],
    config: MegarlConfig,
    *,
    kl: Tensor | None,
    kl_coefficient: float,
) -> Batch:
    """Add the field `advantages` to a batch that holds the models' predictions.

    Also adds `returns` if a critic is trained, and `outcomes` if an implicit reward model is. `kl` is the result of
    `kl_in_reward`.

    Raises UserError naming the response if a prediction is not finite, and as `estimate_compact` does.
    """
    algorithm = config.algorithm
    prompts = prompt_of_each(groups)

    def describe(index: int) -> str:
        return f"response {index} of the step, to prompt {prompts[index].index} ({prompts[index].data_source})"

    _check_predictions(batch, describe)
    inputs = _inputs(batch, groups, config, kl=kl, kl_coefficient=kl_coefficient)
    advantages, targets = estimate_compact(algorithm.advantage, inputs, algorithm.advantage_options, describe)
    of_response = ADVANTAGES[algorithm.advantage].of_response
    if "teacher_log_probs" in inputs and algorithm.distillation_coefficient:
        of_tokens = inputs["responses"].spread(advantages) if of_response else advantages
        advantages = of_tokens + algorithm.distillation_coefficient * call(distillation, inputs)
        of_response = False
    fields = {"advantages": (at_responses if of_response else at_trained_tokens)(advantages, batch)}
    if targets is not None:
        fields["returns"] = at_trained_tokens(targets, batch)
    if "process_rewards" in inputs:
        fields["outcomes"] = at_responses(_outcomes(inputs["rewards"], algorithm.advantage), batch)
    return with_fields(batch, **fields)


def _inputs(
    batch: Batch,
    groups: Sequence[PromptGroup],
    config: MegarlConfig,
    *,
    kl: Tensor | None,
    kl_coefficient: float,
) -> dict[str, Any]:
    """Everything that an estimator may ask for by name (`INPUTS`): values per response and per trained token."""
    algorithm = config.algorithm
    responses = trained_responses(batch)
    known = {name: at_trained(name, batch) for name in _fields_to_fetch(algorithm) & batch.fields.keys()}
    trajectories = trajectories_of(groups)
    terms = _terms(trajectories)
    return {
        "responses": responses,
        "groups": group_of_each(groups),
        "rewards": torch.tensor([each.reward for each in trajectories]),
        "penalties": terms.pop(OVERLONG, None),
        "parts": terms,
        "part_weights": _term_weights(config),
        "token_rewards": None if kl is None else -kl_coefficient * kl,
        "baseline_rewards": _baseline_rewards(groups),
        "importance_weights": _importance_weights(known, responses, algorithm),
        **{name: known[each.batch_field] for name, each in INPUTS.items() if each.batch_field in known},
    }


_PREDICTIONS = {
    "rollout_log_probs": "engine's log-prob",
    "reference_log_probs": "reference's log-prob",
    **{each.batch_field: each.word for each in INPUTS.values() if each.batch_field and each.word},
}
"""Field -> how an error names one of its values, for the fields that models predict."""


def _fields_to_fetch(config: AlgorithmConfig) -> set[str]:
    """Names of the per-token fields that the advantages are computed from; no others are fetched."""
    inputs = set(ADVANTAGES[config.advantage].needs)
    if config.distillation_coefficient:
        inputs |= {"old_log_probs", "teacher_log_probs"}
    fields = {field for name in inputs if (field := INPUTS[name].batch_field)}
    return fields | {"rollout_log_probs"} if config.corrections and "old_log_probs" in fields else fields


def _check_predictions(batch: Batch, describe: Callable[[int], str]) -> None:
    """Raise UserError for a prediction that is not finite. Fetches only the sequences known to hold one."""
    for field, what in _PREDICTIONS.items():
        if suspects := not_finite(batch.fields.get(field, ())):
            part = batch.select(suspects)
            check_finite(what, at_trained(field, part), lambda i: describe(suspects[i]), trained_responses(part))


def _terms(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Weighted reward terms by name, each [N] over the responses; 0 for a response without the term."""
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.scored.terms)
    return {name: torch.tensor([each.scored.terms.get(name, 0.0) for each in trajectories]) for name in names}


def _term_weights(config: MegarlConfig) -> dict[str, float]:
    named = {name: term.weight for name, term in config.reward.functions.items()}
    return {**named, REWARD_MODEL: config.reward_model.weight}


def _importance_weights(known: Mapping[str, Tensor], responses: Ragged, config: AlgorithmConfig) -> Tensor | None:
    """Correction factor of each trained token, for estimators that weight by it; None without corrections."""
    if not config.corrections or "old_log_probs" not in known:
        return None
    return correction_factor(config.corrections, known["old_log_probs"] - known["rollout_log_probs"], responses)


def _baseline_rewards(groups: Sequence[PromptGroup]) -> Tensor | None:
    known = [group.baseline.reward for group in groups if group.baseline for _ in group.trajectories]
    return torch.tensor(known) if len(known) == sum(len(group.trajectories) for group in groups) else None


def _outcomes(rewards: Tensor, advantage: str) -> Tensor:
    if bool(((rewards < 0) | (rewards > 1)).any()):
        raise UserError(
            f"algorithm.advantage={advantage} learns from outcomes between 0 and 1, but a reward is "
            f"{float(rewards[(rewards < 0) | (rewards > 1)][0]):g}: use a reward function that says right or wrong"
        )
    return rewards
