"""Compares engine and trainer log-probs after a refit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from math import ceil

import torch
from torch import Tensor

from megarl.cluster.colocation import GpuSharing
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.data import Turn
from megarl.data.stretches import fetch
from megarl.rollout.protocol import Request, SamplingParameters
from megatron_ext.packing.packing import RaggedBatch

_PROMPTS_PER_ENGINE = 2
_BEFORE_ALL = -1
"""The priority of requests that a refit waits for; those of a rollout count from 0."""


class LogProbMismatchError(RuntimeError):
    """The engines do not compute with the trainer's weights."""


@dataclass(frozen=True)
class LogProbCheck:
    """Lets every engine answer some of `prompts` greedily, in at most `max_tokens`, and the trainer score them."""

    prompts: Sequence[list[int]]
    max_tokens: int
    tolerance: float

    def __call__(self, trainer: TrainerGroup, engines: EngineGroup, gpus: GpuSharing) -> dict[str, float]:
        """Return metrics.

        Raises LogProbMismatchError if the mean difference of the log-probs of engine and trainer exceeds `tolerance`,
        in nats, for any response.
        """
        ranks = trainer.parallel.data_parallel_size
        prompts = list(islice(cycle(self.prompts), max(_PROMPTS_PER_ENGINE, ceil(ranks / len(engines)))))
        sampling = SamplingParameters(temperature=0.0, max_tokens=self.max_tokens)
        gpus.switch_to(engines)
        answered = engines.generate_in_each([Request(prompt, sampling, _BEFORE_ALL) for prompt in prompts])
        gpus.switch_to(trainer)
        if not answered:  # all have died; their replacements are given the weights first
            return {}
        asked = [(prompt, given[0]) for of_engine in answered for prompt, given in zip(prompts, of_engine, strict=True)]
        # Repeat answers so that each rank has some, even if an engine has died.
        asked = list(islice(cycle(asked), max(len(asked), ranks)))
        differences = log_prob_differences(trainer, asked, temperature=1.0)
        return {"refit/log_prob_difference": largest_mean(differences, self.tolerance)}


def largest_mean(differences: Sequence[Tensor], tolerance: float) -> float:
    """The largest of the responses' means. Raises LogProbMismatchError if one exceeds `tolerance`, or is NaN."""
    # Python's max would lose a NaN behind a number.
    largest = torch.stack([each.mean() for each in differences]).max().item()
    if not largest <= tolerance:
        raise LogProbMismatchError(
            f"after a refit the log-probabilities of engine and trainer differ by {largest:.4f} nats in the mean of a "
            f"response, and refit.log_prob_tolerance is {tolerance}: the engine does not have the trainer's weights"
        )
    return largest


def log_prob_differences(
    trainer: TrainerGroup, answered: Sequence[tuple[list[int], Turn]], *, temperature: float
) -> list[Tensor]:
    """|engine - trainer| of the log-probs of each turn's tokens; `answered` pairs a turn with the tokens before it.

    Needs at least one turn per data-parallel rank.
    """
    answers = [before + fetch(turn.token_ids).tolist() for before, turn in answered]
    lengths = [len(answer) for answer in answers]
    batch = Batch.of(RaggedBatch(torch.tensor(list(chain.from_iterable(answers))), torch.tensor(lengths)))
    scored = fetch_tensor(trainer.log_probs(batch, temperature=temperature)).split(lengths)
    return [
        (own[len(before) :] - torch.tensor(fetch(turn.log_probs))).abs()
        for (before, turn), own in zip(answered, scored, strict=True)
    ]
