"""Preference pairs: loading, drawing, batching and evaluation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from megarl.algorithms import Metrics
from megarl.algorithms.finite import check_finite
from megarl.algorithms.ragged import Ragged
from megarl.data import PreferencePair, PromptSampler, load_pairs
from megarl.data.sampler import digest_of
from megarl.run.batches import BatchStream, StepBatch
from megarl.run.opening import RunSetup
from megarl.stages.conversations import conversation_batch
from megatron_ext.objective import Objective
from megatron_ext.packing.packing import DRAFTED, RaggedBatch, pack

P = TypeVar("P")


def read_pairs(setup: RunSetup) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Load the pairs to train on and the held-out pairs, which may be none."""
    config = setup.config
    load = partial(
        load_pairs,
        tokenizer=setup.model.tokenizer,
        config=config.preference,
        max_tokens=config.loop.max_tokens_per_micro_batch,
        shared_prefixes=config.loop.shared_prefixes,
        stop_token_ids=setup.model.stop_token_ids,
    )
    train, held_out = (
        load(files) if files else [] for files in (config.preference.train_files, config.preference.eval_files)
    )
    return train, held_out


def digest_of_pairs(pairs: Sequence[PreferencePair]) -> str:
    """Digest of the tokens of all replies; it changes with any reply and with their order."""
    return digest_of(reply.token_ids for pair in pairs for reply in pair)


def pair_batch(pairs: Sequence[PreferencePair]) -> RaggedBatch:
    """Batch pairs for a preference objective; multi-token-prediction layers learn from the chosen replies only."""
    batch = conversation_batch([reply for pair in pairs for reply in pair], "seq_mean_token_sum", unit=2)
    is_chosen = torch.arange(len(batch)) % 2 == 0
    return batch.with_fields(**{DRAFTED: is_chosen.repeat_interleave(batch.lengths)})


def draw_pairs(
    setup: RunSetup,
    sampler: PromptSampler,
    train: Sequence[PreferencePair],
    prepare: Callable[[RaggedBatch], RaggedBatch] = lambda batch: batch,
) -> BatchStream:
    """Endless batches of `preference.pairs_per_step` pairs, each passed through `prepare`."""
    count = setup.config.preference.pairs_per_step

    def make(sampler: PromptSampler, _step: int) -> list[StepBatch]:
        return [StepBatch(prepare(pair_batch([train[index] for index in sampler.next(count)])))]

    return setup.batches(sampler, make)


def with_reference(batch: RaggedBatch, log_probs: Tensor) -> RaggedBatch:
    """Add the reference's log-probs [T] to a batch of pairs. Raises UserError if one is not finite."""
    check_finite("reference model's log-probability", log_probs, _name, Ragged(batch.lengths))
    return batch.with_fields(reference_log_probs=log_probs)


def held_out_metrics(objective: Objective[P, Metrics], predictions: P, batch: RaggedBatch) -> dict[str, float]:
    """Metrics of an objective on a batch of held-out pairs, without training; `predictions` cover the whole batch."""
    _, metrics = objective(predictions, pack(batch, range(len(batch))))
    return {name.replace("/", "/eval_", 1): float(value) for name, value in metrics.sums.items()}


def _name(sequence: int) -> str:
    return f"the {('chosen', 'rejected')[sequence % 2]} reply of pair {sequence // 2} (from 0) of the batch"
