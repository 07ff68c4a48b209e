"""A training batch to new weights, and what there is to say about the step."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from megarl.algorithms import ImplicitRewardObjective, Metrics, PolicyObjective, ValueObjective
from megarl.cluster.trainer_group import TrainerGroup
from megarl.diagnostics import expert_metrics
from megarl.schema import MegarlConfig
from megarl.stages.advantage import weighted
from megarl.tracking import MetricValue
from megatron_ext.objective import Objective
from megatron_ext.packing import RaggedBatch


def update_policy(
    trainer: TrainerGroup,
    batches: Sequence[RaggedBatch],
    objective: PolicyObjective,
    *,
    temperature: float,
    seed: Sequence[int],
) -> dict[str, MetricValue]:
    """As `update`; where the loss chooses tokens by what the policy says of all of them, that is asked for first.

    Such a choice is random with `seed`.
    """
    if not objective.needs_selection:
        return update(trainer, batches, objective, temperature=temperature)
    return update(
        trainer, _selected(trainer, batches, objective, temperature, seed), objective, temperature=temperature
    )


def _selected(
    trainer: TrainerGroup,
    batches: Sequence[RaggedBatch],
    objective: PolicyObjective,
    temperature: float,
    seed: Sequence[int],
) -> Iterator[RaggedBatch]:
    # A generator, so that each choice is made with the weights that the optimizer step before it left.
    for number, batch in enumerate(batches):
        present = trainer.log_probs(batch, temperature=temperature).log_probs
        yield batch.with_fields(chosen=objective.select(batch, present, seed=(*seed, number)))


def update_critic(critic: TrainerGroup, batches: Sequence[RaggedBatch], config: MegarlConfig) -> dict[str, MetricValue]:
    """As `update`, of a value model: towards the field `returns`, not far from `old_values`."""
    own = [weighted(batch, "token_mean") for batch in batches]
    return update(critic, own, ValueObjective(config.critic.value_clip), temperature=1.0, of="value")


def update_implicit_reward_model(
    model: TrainerGroup, batches: Sequence[RaggedBatch], config: MegarlConfig
) -> dict[str, MetricValue]:
    """As `update`, of an implicit reward model: towards the field `outcomes`."""
    own = [
        weighted(
            batch.with_fields(reference_log_probs=batch.fields["implicit_reference_log_probs"]),
            "seq_mean_token_sum",
        )
        for batch in batches
    ]
    objective = ImplicitRewardObjective(config.reward_model.beta)
    return update(model, own, objective, temperature=1.0, of="prime")


def update(
    trainer: TrainerGroup,
    batches: Iterable[RaggedBatch],
    objective: Objective,
    *,
    temperature: float,
    of: str = "policy",
) -> dict[str, MetricValue]:
    """One optimizer step per batch; metrics are means over the batches, maxima over all.

    `of` names what is trained, for its gradient norm and learning rate.
    """
    steps = [trainer.train_step(batch, objective, temperature=temperature) for batch in batches]
    loads = [step[0].expert_load for step in steps if step[0].expert_load is not None]
    merged = [Metrics.merge([part for result in step for part in result.metrics]) for step in steps]
    return {
        **Metrics.summary(merged),
        f"{of}/gradient_norm": sum(step[0].gradient_norm for step in steps) / len(steps),
        f"{of}/learning_rate": steps[-1][0].learning_rate,
        **(expert_metrics(torch.stack(loads).sum(0)) if loads and of == "policy" else {}),
    }
