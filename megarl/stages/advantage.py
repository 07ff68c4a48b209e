"""Scored trajectories to training batches: advantages, and the weight of every token in the loss."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS
from megarl.algorithms.advantages import ScoredResponses, distillation, estimate
from megarl.algorithms.corrections import correction_factor
from megarl.algorithms.finite import check_finite
from megarl.algorithms.ragged import Ragged
from megarl.data import Trajectory
from megarl.rewards import OVERLONG
from megarl.schema import AlgorithmConfig, MegarlConfig
from megarl.stages.rollout import sequences
from megarl.stages.sample import REWARD_MODEL
from megatron_ext.packing import RaggedBatch


@dataclass(frozen=True)
class Prepared:
    """Output of the advantage stage for a step."""

    batches: list[RaggedBatch]
    """One per optimizer step, with the fields that the objectives read."""
    responses: Ragged
    advantages: Tensor
    """[T] of `responses`."""
    kl: float | None
    """Mean over the tokens of the KL to the reference, where it goes into the reward."""
    kl_to_teachers: float | None
    """Mean over the tokens of the old policy's KL to its teachers, where there are any."""


def comparable(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[Trajectory]:
    """Keep the trajectories that statistics are made of, without groups that are too small for a comparison.

    A group shrinks by dropped rewards, and by truncated responses where `truncated_responses_in_statistics` is off.

    Raises UserError if none is left.
    """
    counted = list(trajectories)
    if not config.train_on_truncated_responses and not config.truncated_responses_in_statistics:
        counted = [trajectory for trajectory in counted if not _is_truncated(trajectory)]
    smallest = ADVANTAGES[config.advantage].smallest_group
    sizes = Counter(trajectory.group for trajectory in counted)
    kept = [trajectory for trajectory in counted if sizes[trajectory.group] >= smallest]
    if not kept:
        cut = sum(map(_is_truncated, trajectories))
        raise UserError(
            f"no prompt of this step has {smallest} {'responses' if smallest > 1 else 'response'} to learn from: of"
            f" the {len(trajectories)} that were scored {cut} were truncated at rollout.max_response_tokens, and those"
            " whose reward failed had been dropped; raise rollout.max_response_tokens, or repair reward.function"
        )
    return kept


def _is_truncated(trajectory: Trajectory) -> bool:
    return trajectory.finish_reason == "length"


def ragged_batch(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> RaggedBatch:
    """Prompts and responses end to end.

    Fields: `trained`, True at the tokens that are trained on; `rollout_log_probs`, 0 on prompt tokens; `response` and
    `prompt`, the places of the trajectory in the step and of its prompt in the data, which name a token in an error.
    """
    trained, log_probs = [], []
    for trajectory in trajectories:
        prompt, response = len(trajectory.prompt.token_ids), len(trajectory.token_ids)
        counts = config.train_on_truncated_responses or not _is_truncated(trajectory)
        trained += [False] * prompt + [counts] * response
        log_probs += [0.0] * prompt + list(trajectory.log_probs)
    tokens, lengths = sequences(trajectories)
    fields = {
        "trained": torch.tensor(trained),
        "rollout_log_probs": torch.tensor(log_probs),
        "response": torch.arange(len(trajectories)).repeat_interleave(lengths),
        "prompt": torch.tensor([trajectory.prompt.index for trajectory in trajectories]).repeat_interleave(lengths),
    }
    return RaggedBatch(tokens, lengths, fields)


def advantage(
    trajectories: Sequence[Trajectory],
    batch: RaggedBatch,
    config: MegarlConfig,
    *,
    kl_coefficient: float,
) -> Prepared:
    """The batches of the step's optimizer steps, from that of `ragged_batch` with the predictions of the models.

    `kl_coefficient` is that of a KL in the reward. Raises UserError for what is not a finite number, naming the
    response, and as `estimate` does.
    """
    algorithm, trained = config.algorithm, batch.fields["trained"]
    responses = trained_responses(batch)
    known = {name: values[trained] for name, values in batch.fields.items()}

    def describe(index: int) -> str:
        prompt = trajectories[index].prompt
        return f"response {index} of the step, to prompt {prompt.index} ({prompt.data_source})"

    for field in ("rollout_log_probs", "reference_log_probs"):
        if field in known:
            check_finite(_LOG_PROBS[field], known[field], describe, responses)
    kl = None
    if algorithm.kl_in == "reward" and kl_coefficient:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](known["old_log_probs"], known["reference_log_probs"])
    terms, groups = _terms(trajectories), torch.tensor([trajectory.group for trajectory in trajectories])
    scored = ScoredResponses(
        responses=responses,
        groups=groups,
        rewards=torch.tensor([trajectory.reward for trajectory in trajectories]),
        penalties=terms.pop(OVERLONG, None),
        parts=terms,
        part_weights=_term_weights(config),
        token_rewards=None if kl is None else -kl_coefficient * kl,
        values=known.get("old_values"),
        baseline_rewards=_baseline_rewards(trajectories),
        old_log_probs=known.get("old_log_probs"),
        probability_squares=known.get("probability_squares"),
        importance_weights=_importance_weights(known, responses, algorithm),
        process_rewards=known.get("process_rewards"),
        teacher_log_probs=known.get("teacher_log_probs"),
    )
    estimated = estimate(algorithm.advantage, scored, algorithm.advantage_options, describe)
    advantages, to_teachers = estimated.advantages, None
    if scored.teacher_log_probs is not None:
        gain = distillation(scored).advantages
        to_teachers = -float(gain.mean())
        if algorithm.distillation_coefficient:
            advantages = advantages + algorithm.distillation_coefficient * gain
    fields = {"advantages": _placed(advantages, trained)}
    if estimated.returns is not None:
        fields["returns"] = _placed(estimated.returns, trained)
    if scored.process_rewards is not None:
        fields["outcomes"] = _placed(responses.spread(_outcomes(scored.rewards)), trained)
    batch = batch.with_fields(**fields)
    options = _aggregation_options(config)
    parts = _mini_batches(trajectories, responses, algorithm.updates_per_step)
    return Prepared(
        batches=[weighted(batch.select(part), algorithm.aggregation, groups[part], options) for part in parts],
        responses=responses,
        advantages=advantages,
        kl=None if kl is None else float(kl.mean()),
        kl_to_teachers=to_teachers,
    )


def trained_responses(batch: RaggedBatch) -> Ragged:
    """The tokens of `batch` that are trained on."""
    return Ragged(torch.stack([each.sum() for each in batch.split_field("trained")]))


def _aggregation_options(config: MegarlConfig) -> Mapping[str, Any]:
    """Options of the aggregation; a constant length is that of the longest response unless it is given."""
    options = config.algorithm.aggregation_options
    takes_length = "length" in AGGREGATIONS[config.algorithm.aggregation].options
    return {"length": config.rollout.max_response_tokens, **options} if takes_length else options


def weighted(
    batch: RaggedBatch, aggregation: str, groups: Tensor | None = None, options: Mapping[str, Any] | None = None
) -> RaggedBatch:
    """`batch`, that of one optimizer step, with the field `weights`: 0 at tokens that are not trained on.

    `groups` long[N] says which responses are to the same prompt, where the aggregation asks for it; `options` are its.
    """
    weights = AGGREGATIONS[aggregation](trained_responses(batch).lengths, groups, options)
    return batch.with_fields(weights=_placed(weights, batch.fields["trained"]))


_LOG_PROBS = {"rollout_log_probs": "engine's log-prob", "reference_log_probs": "reference's log-prob"}


def _placed(values: Tensor, trained: Tensor) -> Tensor:
    """Values of the trained tokens at their places in the batch, 0 at all others."""
    return torch.zeros(len(trained)).masked_scatter(trained, values.float())


def _terms(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """The weighted, named rewards of all responses; one that a response does not have is 0 there."""
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.scored.terms)
    return {name: torch.tensor([each.scored.terms.get(name, 0.0) for each in trajectories]) for name in names}


def _term_weights(config: MegarlConfig) -> dict[str, float]:
    named = {name: term.weight for name, term in config.reward.functions.items()}
    return {**named, REWARD_MODEL: config.reward_model.weight}


def _importance_weights(known: Mapping[str, Tensor], responses: Ragged, config: AlgorithmConfig) -> Tensor | None:
    """Correction factor of each token, for an advantage that takes it into account; None without corrections."""
    if not config.corrections or "old_log_probs" not in known:
        return None
    return correction_factor(config.corrections, known["old_log_probs"] - known["rollout_log_probs"], responses)


def _baseline_rewards(trajectories: Sequence[Trajectory]) -> Tensor | None:
    known = [each.baseline_reward for each in trajectories if each.baseline_reward is not None]
    return torch.tensor(known) if len(known) == len(trajectories) else None


def _outcomes(rewards: Tensor) -> Tensor:
    if bool(((rewards < 0) | (rewards > 1)).any()):
        raise UserError(
            f"algorithm.advantage=prime learns from outcomes between 0 and 1, but a reward is "
            f"{float(rewards[(rewards < 0) | (rewards > 1)][0]):g}: use a reward function that says right or wrong"
        )
    return rewards


def _mini_batches(trajectories: Sequence[Trajectory], responses: Ragged, count: int) -> list[list[int]]:
    """Indices of the trajectories of each mini-batch: whole prompts, in order.

    One in which nothing is trained on, since all its responses were truncated, would be no optimizer step: it is left
    out.
    """
    groups = list(dict.fromkeys(trajectory.group for trajectory in trajectories))
    place = {group: position * count // len(groups) for position, group in enumerate(groups)}
    batches: list[list[int]] = [[] for _ in range(count)]
    for index, trajectory in enumerate(trajectories):
        batches[place[trajectory.group]].append(index)
    lengths = responses.lengths.tolist()
    return [batch for batch in batches if any(lengths[index] for index in batch)]
