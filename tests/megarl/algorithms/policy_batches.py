"""Random batches of responses in float64, whose log-probs are the parameters, and their cuts into micro-batches."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import Metrics, PolicyObjective
from megarl.algorithms.aggregation import AGGREGATIONS
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, pack

# Each sequence's cut: the prompt's length, and which tokens after it are trained on.
sequences = st.lists(
    st.tuples(st.integers(1, 3), st.lists(st.booleans(), min_size=1, max_size=6)), min_size=1, max_size=7
).filter(lambda drawn: any(any(trained) for _, trained in drawn))


def random_batch(
    shapes: Sequence[tuple[int, Sequence[bool]]], seed: int, aggregation: str = "token_mean", spread: float = 0.3
) -> tuple[RaggedBatch, Tensor]:
    """A batch with all fields, not a number where nothing is trained on, and the log-probs under the policy [T].

    The field `place` says which of the log-probs is a token's.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = torch.cat([torch.tensor([False] * prompt + list(mask)) for prompt, mask in shapes])
    total = len(trained)

    def noise(size: float) -> Tensor:
        return size * torch.randn(total, generator=generator, dtype=torch.float64)

    log_probs = -0.05 - noise(1.0).abs()
    lengths = torch.tensor([sum(mask) for _, mask in shapes])
    inside = {
        "advantages": noise(1.0),
        "old_log_probs": (log_probs + noise(spread)).clamp(max=-1e-3),
        "rollout_log_probs": (log_probs + noise(spread)).clamp(max=-1e-3),
        "reference_log_probs": (log_probs + noise(spread)).clamp(max=-1e-3),
        "returns": noise(1.0),
        "old_values": noise(1.0),
        "staleness": noise(2.0).abs().floor(),
    }
    fields = {name: values.masked_fill(~trained, float("nan")) for name, values in inside.items()}
    groups = torch.arange(len(lengths)) % 3
    options = {"length": 8} if "length" in AGGREGATIONS[aggregation].options else {}
    weights = AGGREGATIONS[aggregation](lengths, groups, options).double()
    fields["weights"] = torch.zeros(total, dtype=torch.float64).masked_scatter(trained, weights)
    fields["place"] = torch.arange(total)
    sizes = torch.tensor([prompt + len(mask) for prompt, mask in shapes])
    return RaggedBatch(torch.zeros(total, dtype=torch.long), sizes, fields), log_probs


def predictions_of(log_probs: Tensor, micro_batch: MicroBatch) -> LogProbs:
    """The log-probs [T] of the whole batch at the places of a micro-batch, and an entropy that depends on them."""
    here = log_probs[micro_batch.fields["place"]]
    return LogProbs(here, here.square(), torch.ones_like(here, dtype=torch.bool))


def run(
    objective: PolicyObjective, batch: RaggedBatch, log_probs: Tensor, cut: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Metrics]:
    """Loss, gradient [T] and metrics over the micro-batches of `cut`; one may have no sequence."""
    log_probs = log_probs.clone().requires_grad_()
    total, pieces = torch.zeros((), dtype=torch.float64), []
    for members in cut:
        micro_batch = pack(batch, members, align=2)
        loss, metrics = objective(predictions_of(log_probs, micro_batch), micro_batch)
        loss.backward()
        total += loss.detach()
        pieces.append(metrics)
    assert log_probs.grad is not None
    return total, log_probs.grad, Metrics.merge(pieces)
