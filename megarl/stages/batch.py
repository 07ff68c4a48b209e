"""Turn groups into the batches that the trainer's ranks compute with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import AGGREGATIONS
from megarl.algorithms.ragged import Ragged
from megarl.cluster.trainer.batch import Batch
from megarl.data import PromptGroup, Trajectory, prompt_of_each, trajectories_of
from megarl.data.stretches import Array, RunLengthArray, Stretch, Values, fetch
from megarl.diagnostics import AdvantageStretches
from megarl.schema import AlgorithmConfig, MegarlConfig
from megarl.stages.fields import with_fields


def to_batch(groups: Sequence[PromptGroup], config: AlgorithmConfig) -> Batch:
    """Build the batch of all trajectories, group by group, without copying their tokens or log-probs.

    Mini-batches consist of whole groups, in order.

    Fields: `trained`, True at the tokens that are trained on; `rollout_log_probs`, 0 at tokens that were not sampled;
    `routed_experts`, if they are replayed. Names, for errors: `response`, the index of the trajectory in the step, and
    `prompt`, the index of its prompt in the data.
    """
    trajectories = trajectories_of(groups)
    prompts = [prompt.index for prompt in prompt_of_each(groups)]
    fields: dict[str, Sequence[Values]] = {
        "trained": [_trained(each, config) for each in trajectories],
        "rollout_log_probs": [each.log_probs for each in trajectories],
    }
    if config.router_replay == "rollout":
        fields["routed_experts"] = [_routed_experts(each) for each in trajectories]
    names = {"response": np.arange(len(trajectories)), "prompt": np.array(prompts)}
    group = group_of_each(groups).numpy()
    mini_batch = group * config.updates_per_step // len(groups)
    described = replace(whole(trajectories), names=names, mini_batch_of_sequence=mini_batch)
    return with_fields(described, **fields)


def mini_batches(batch: Batch, groups: Sequence[PromptGroup], config: MegarlConfig) -> list[Batch]:
    """Split into one batch per optimizer step (`Batch.sequences_by_mini_batch`) and add the field `weights`.

    A mini-batch without a trained token, because all its responses were truncated, is left out.
    """
    lengths = trained_responses(batch).lengths
    group, options = group_of_each(groups), _aggregation_options(config)
    return [
        weighted(batch.select(each.tolist()), config.algorithm.aggregation, group[each], options)
        for each in batch.sequences_by_mini_batch()
        if bool(lengths[each].any())
    ]


def weighted(
    batch: Batch,
    aggregation: str,
    groups: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
) -> Batch:
    """Add the field `weights` to the batch of one optimizer step; 0 at tokens that are not trained on.

    `groups` long[N] is the group of each response, needed by some aggregations; `options` are the aggregation's.
    """
    weights = AGGREGATIONS[aggregation].of_responses(trained_responses(batch).lengths, groups, options)
    return with_fields(batch, weights=at_responses(weights, batch))


def group_of_each(groups: Sequence[PromptGroup]) -> Tensor:
    """long[N]: the index of each trajectory's group."""
    return torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group.trajectories) for group in groups]))


def trained_responses(batch: Batch) -> Ragged:
    """Build the `Ragged` of the batch's responses: their lengths in trained tokens."""
    runs = [*_runs(batch), RunLengthArray(np.empty(0, dtype=bool), np.empty(0, dtype=np.int32))]
    counts = np.concatenate([each.lengths for each in runs]) * np.concatenate([each.values for each in runs])
    sums = np.concatenate([[0], counts.cumsum(dtype=np.int64)])
    ends = np.cumsum([len(each.values) for each in runs[:-1]], dtype=np.int64)
    return Ragged(torch.from_numpy(np.diff(sums[ends], prepend=0)))


def at_responses(values: Tensor, batch: Batch) -> list[Values]:
    """Spread one value per sequence [N] over its trained tokens: float32, 0 at all other tokens."""
    return _at_runs(values.float().numpy(), list(_runs(batch)))


def at_trained_tokens(values: Tensor, batch: Batch) -> list[Values]:
    """Scatter values of the trained tokens to their places in the batch: float32, 0 at all other tokens.

    A response whose values are all equal is stored as runs.
    """
    lengths, runs, own = trained_responses(batch).lengths.numpy(), list(_runs(batch)), values.float().numpy()
    starts = lengths.cumsum() - lengths
    firsts = np.zeros(len(lengths), dtype=np.float32)
    firsts[lengths > 0] = own[starts[lengths > 0]]
    at_runs = _at_runs(firsts, runs)
    are_equal = _are_equal(own, starts, lengths)
    for sequence in (~are_equal).nonzero()[0].tolist():
        start = starts[sequence]
        at_runs[sequence] = (_placed(own[start : start + lengths[sequence]], runs[sequence]),)
    return at_runs


def at_trained(name: str, batch: Batch) -> Tensor:
    """Fetch a field into this process and gather it at the trained tokens of all sequences."""
    return batch.values(name)[batch.values("trained")]


def advantage_stretches(batch: Batch) -> AdvantageStretches:
    """Statistics of the trained tokens' advantages, response by response.

    Responses whose tokens differ are fetched one at a time: arrays over the tokens of all would take gigabytes.
    """
    equal: list[tuple[Array, Array, Array]] = []
    different: list[tuple[int, Stretch, RunLengthArray]] = []
    for response, ((stretch,), trained) in enumerate(zip(batch.fields["advantages"], _runs(batch), strict=True)):
        if isinstance(stretch, RunLengthArray) and stretch.lengths is trained.lengths:
            equal.append((stretch.values, trained.lengths * trained.values, np.full(len(trained.values), response)))
        else:
            different.append((response, stretch, trained))
    nothing = np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.int64)
    values, tokens, responses = (np.concatenate(each) for each in zip(nothing, *equal, strict=True))
    chosen = tokens > 0
    of_equal = AdvantageStretches.of_equal(
        values[chosen].astype(np.float64), tokens[chosen].astype(np.float64), responses[chosen]
    )
    of_tokens = ((response, fetch(stretch)[fetch(trained)]) for response, stretch, trained in different)
    return of_equal + AdvantageStretches.of_different((each, own) for each, own in of_tokens if len(own))


def whole(trajectories: Sequence[Trajectory]) -> Batch:
    """A batch of whole conversations, prompts included, without any field."""
    return Batch(np.array([each.length for each in trajectories]), [each.token_ids for each in trajectories])


def _aggregation_options(config: MegarlConfig) -> Mapping[str, Any]:
    """Options of the aggregation; its `length` defaults to `rollout.max_response_tokens`."""
    options = config.algorithm.aggregation_options
    takes_length = "length" in AGGREGATIONS[config.algorithm.aggregation].options
    return {"length": config.rollout.max_response_tokens, **options} if takes_length else options


def is_trained_on(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Whether the policy is trained on the sampled tokens of `trajectory`."""
    return config.train_on_truncated_responses or not trajectory.is_truncated


def _trained(trajectory: Trajectory, config: AlgorithmConfig) -> Values:
    sampled = trajectory.is_sampled
    return (RunLengthArray(sampled.values & is_trained_on(trajectory, config), sampled.lengths),)


def _routed_experts(trajectory: Trajectory) -> Values:
    if not trajectory.routed_experts:
        raise RuntimeError("an engine that was asked for the experts of its tokens gave none with a turn")
    return trajectory.routed_experts


def _runs(batch: Batch) -> Iterator[RunLengthArray]:
    """The field `trained` of each sequence, which `to_batch` makes as runs."""
    for (runs,) in batch.fields["trained"]:
        assert isinstance(runs, RunLengthArray)
        yield runs


def _are_equal(values: Array, starts: Array, lengths: Array) -> Array:
    """bool[N]: whether all `values` [T] of a sequence are the same, to the bit."""
    # bool, not the int of numpy's diff: there may be millions of tokens.
    bits, changes = values.view(np.int32), np.zeros(len(values), dtype=bool)
    changes[:-1] = bits[1:] != bits[:-1]
    several = lengths > 1
    are_equal = ~several
    if several.any():
        # reduceat over [first, last) of each sequence and [last, next first); [::2] keeps the former.
        bounds = np.stack([starts, starts + lengths - 1], axis=1)[several].ravel()
        are_equal[several] = ~np.logical_or.reduceat(changes, bounds)[::2]
    return are_equal


def _at_runs(values: Array, runs: Sequence[RunLengthArray]) -> list[Values]:
    """Spread one value per sequence [N] over its trained tokens, 0 at all others; `runs` is the field `trained`."""
    counts = np.array([len(each.values) for each in runs], dtype=np.int64)
    is_trained = np.concatenate([np.empty(0, dtype=bool), *[each.values for each in runs]])
    placed = np.where(is_trained, np.repeat(values, counts), np.float32(0))
    ends = [0, *counts.cumsum().tolist()]
    return [(RunLengthArray(placed[a:b], each.lengths),) for (a, b), each in zip(pairwise(ends), runs, strict=True)]


def _placed(values: Array, trained: RunLengthArray) -> Array:
    """Scatter the values of a sequence's trained tokens to their places, 0 at all others."""
    placed = np.zeros(int(trained.lengths.sum()), dtype=np.float32)
    placed[np.repeat(trained.values, trained.lengths)] = values
    return placed
