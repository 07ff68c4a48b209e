"""Random sequences whose every token has a log-prob (or value) of its own, and objectives run on cuts of them."""

import random
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import Metrics
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, pack

# Prompt and reply lengths; some are long.
sequence_shapes = st.tuples(st.integers(1, 4), st.one_of(st.integers(1, 9), st.just(1000)))
pair_shapes = st.lists(st.tuples(sequence_shapes, sequence_shapes), min_size=1, max_size=5)
seeds = st.integers(0, 1000)


def random_sequences(shapes: Sequence[tuple[int, int]], seed: int, unit: int = 1) -> tuple[RaggedBatch, Tensor]:
    """Sequences of (prompt, reply) lengths, and log-probs [T] of their tokens.

    The tokens are numbered through: token t of a micro-batch is position t of the batch. About a quarter of the reply
    tokens has no weight (turns of others); a reply keeps at least its last token. Outside the trained tokens the
    fields are not numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    trained = [[False] * prompt + [draw.random() < 0.75 for _ in range(reply - 1)] + [True] for prompt, reply in shapes]
    mask = torch.tensor([token for sequence in trained for token in sequence])
    log_probs = -torch.rand(len(mask), generator=generator)
    reference = log_probs + 0.2 * torch.randn(len(mask), generator=generator)
    outcomes = torch.cat([torch.full((len(sequence),), draw.choice([0.0, 0.3, 1.0])) for sequence in trained])
    fields = {
        "weights": mask.float() / len(shapes),
        "reference_log_probs": reference.masked_fill(~mask, float("nan")),
        "outcomes": outcomes.masked_fill(~mask, float("nan")),
    }
    lengths = torch.tensor([len(sequence) for sequence in trained])
    return RaggedBatch(torch.arange(len(mask)), lengths, fields, unit), log_probs


def predictions(log_probs: Tensor, micro_batch: MicroBatch) -> LogProbs:
    """Log-probs of a micro-batch of `random_sequences`; not numbers where there is no target."""
    own = log_probs[micro_batch.labels[0]].masked_fill(~micro_batch.targets, float("nan"))
    return LogProbs(own, torch.zeros_like(own), own > 0)


def run(
    batch: RaggedBatch, parameters: Tensor, split: Sequence[Sequence[int]], lose: Callable
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics over the micro-batches of `split`; `lose(parameters, micro_batch)` is an objective."""
    parameters = parameters.clone().requires_grad_()
    losses, pieces = [], []
    for sequences in split:
        loss, metrics = lose(parameters, pack(batch, sequences, align=4))
        loss.backward()
        losses.append(loss.item())
        pieces.append(metrics)
    assert parameters.grad is not None
    return sum(losses), parameters.grad, {name: float(value) for name, value in Metrics.merge(pieces).sums.items()}


def log_ratio_by_the_formula(batch: RaggedBatch, log_probs: Tensor, sequence: int) -> Tensor:
    """log p - log p_ref of one sequence's trained tokens, in float64, token by token."""
    end = int(batch.lengths[: sequence + 1].sum())
    total = torch.zeros((), dtype=torch.float64)
    for position in range(end - int(batch.lengths[sequence]) + 1, end):
        if batch.fields["weights"][position] != 0:
            total = total + log_probs[position].double() - batch.fields["reference_log_probs"][position].double()
    return total


def units_apart(data: st.DataObject, batch: RaggedBatch) -> list[list[int]]:
    """Any cut of a batch into four micro-batches, some of them maybe empty, that keeps units together."""
    units = len(batch) // batch.unit
    place = data.draw(st.lists(st.integers(0, 3), min_size=units, max_size=units))
    return [
        [batch.unit * unit + k for unit, chosen in enumerate(place) if chosen == number for k in range(batch.unit)]
        for number in range(4)
    ]
