"""A training batch to new weights, and what there is to say about the step."""

from collections.abc import Sequence

from megarl.algorithms import Metrics
from megarl.cluster.trainer_group import TrainerGroup
from megatron_ext.objective import Objective
from megatron_ext.packing import RaggedBatch


def update(
    trainer: TrainerGroup, batches: Sequence[RaggedBatch], objective: Objective, *, temperature: float
) -> dict[str, float]:
    """One optimizer step per batch; metrics are means over the batches, maxima over all."""
    steps = [trainer.train_step(batch, objective, temperature=temperature) for batch in batches]
    merged = [Metrics.merge([part for result in step for part in result.metrics]) for step in steps]
    means = {name: sum(float(m.sums[name]) for m in merged) / len(merged) for name in merged[0].sums}
    maxima = {name: max(float(m.maxima[name]) for m in merged) for name in merged[0].maxima}
    return {
        **means,
        **maxima,
        "policy/gradient_norm": sum(step[0].gradient_norm for step in steps) / len(steps),
        "policy/learning_rate": steps[-1][0].learning_rate,
    }
