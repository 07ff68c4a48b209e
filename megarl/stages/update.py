"""Optimizer steps of the policy, the critic and the implicit reward model, and their metrics."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from megarl.algorithms import AnyObjective, ImplicitRewardObjective, Metrics, PolicyObjective, ValueObjective
from megarl.cluster.trainer.batch import Batch, fetch_tensor, sequences_of
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.diagnostics import expert_metrics, replay_metrics
from megarl.schema import MegarlConfig
from megarl.stages.batch import weighted
from megarl.stages.fields import LearnedModel, for_loss, with_fields
from megarl.tracking import MetricValue
from megatron_ext.objective import StepResult

_POLICY: LearnedModel = "policy"
"""The only model whose experts, router losses and prediction layers are reported."""
_METRIC_PREFIXES: Mapping[LearnedModel, str] = {
    "policy": "policy",
    "critic": "value",
    "implicit_reward_model": "prime",
}
"""Model -> prefix of its metrics."""


def update_policy(
    trainer: TrainerGroup,
    batches: Sequence[Batch],
    objective: PolicyObjective,
    *,
    temperature: float,
    seed: Sequence[int],
) -> tuple[dict[str, MetricValue], float | None]:
    """Take one optimizer step per batch; returns metrics, and the mean KL to the reference or None if not computed.

    A loss that selects tokens (clip_cov, kl_cov) needs the policy's log-probs of the whole mini-batch: they are
    computed before its optimizer step. A random selection is seeded with `seed`.
    """
    chosen = _selected(trainer, batches, objective, temperature, seed) if objective.needs_selection else batches
    steps = _optimizer_steps(trainer, chosen, objective, temperature, _POLICY)
    of_steps = [step.kl_to_reference for step in _merged(steps)]
    known = [each.value for each in of_steps if each is not None]
    return _metrics(steps, _POLICY), sum(known) / len(known) if known else None


def _selected(
    trainer: TrainerGroup,
    batches: Sequence[Batch],
    objective: PolicyObjective,
    temperature: float,
    seed: Sequence[int],
) -> Iterator[Batch]:
    # A generator, so that each selection sees the weights after the previous optimizer step.
    for number, batch in enumerate(batches):
        present = fetch_tensor(trainer.log_probs(batch, temperature=temperature, replay=True))
        read = for_loss(batch, _POLICY)
        # Routed experts are large, and only the ranks read them.
        read = read.only(read.fields.keys() - {"routed_experts"})
        chosen = objective.select(read.load(), present, seed=(*seed, number))
        yield with_fields(batch, chosen=sequences_of(chosen, batch.lengths))


def update_critic(critic: TrainerGroup, batches: Sequence[Batch], config: MegarlConfig) -> dict[str, MetricValue]:
    """Take one optimizer step of a value model per batch: regress to `returns`, clipped around `old_values`."""
    own = [weighted(batch, "token_mean") for batch in batches]
    return update(critic, own, ValueObjective(config.critic.value_clip), temperature=1.0, model="critic")


def update_implicit_reward_model(
    trainer: TrainerGroup, batches: Sequence[Batch], config: MegarlConfig
) -> dict[str, MetricValue]:
    """Take one optimizer step of an implicit reward model per batch: fit the field `outcomes`."""
    own = [
        weighted(
            with_fields(batch, reference_log_probs=batch.fields["implicit_reference_log_probs"]),
            "seq_mean_token_sum",
        )
        for batch in batches
    ]
    objective = ImplicitRewardObjective(config.implicit_reward_model.beta)
    return update(trainer, own, objective, temperature=1.0, model="implicit_reward_model")


def update(
    trainer: TrainerGroup,
    batches: Iterable[Batch],
    objective: AnyObjective,
    *,
    temperature: float,
    model: LearnedModel = _POLICY,
) -> dict[str, MetricValue]:
    """Take one optimizer step per batch; metrics are means over the batches, and maxima over all.

    `model` selects the fields that the loss reads and the prefix of the gradient norm and learning rate.
    """
    return _metrics(_optimizer_steps(trainer, batches, objective, temperature, model), model)


def _optimizer_steps(
    trainer: TrainerGroup,
    batches: Iterable[Batch],
    objective: AnyObjective,
    temperature: float,
    model: LearnedModel,
) -> list[StepResult[Metrics]]:
    return [trainer.train_step(for_loss(batch, model), objective, temperature=temperature) for batch in batches]


def _merged(steps: Sequence[StepResult[Metrics]]) -> list[Metrics]:
    """For each optimizer step, merge the metrics of its micro-batches."""
    return [Metrics.merge(step.metrics) for step in steps]


def _metrics(steps: Sequence[StepResult[Metrics]], model: LearnedModel) -> dict[str, MetricValue]:
    loads = [step.expert_load for step in steps if step.expert_load is not None]
    replayed = [step.replayed for step in steps if step.replayed is not None]
    prefix = _METRIC_PREFIXES[model]
    return {
        **Metrics.summary(_merged(steps)),
        f"{prefix}/gradient_norm": sum(step.gradient_norm for step in steps) / len(steps),
        f"{prefix}/learning_rate": steps[-1].learning_rate,
        **(expert_metrics(torch.stack(loads).sum(0)) if loads and model == _POLICY else {}),
        **(_router_losses(steps) if model == _POLICY else {}),
        **(_mtp_metrics(steps) if model == _POLICY else {}),
        **(replay_metrics(torch.stack(replayed).sum(0)) if replayed else {}),
    }


def _router_losses(steps: Sequence[StepResult[Metrics]]) -> dict[str, float]:
    names = steps[0].router_losses
    return {f"experts/{name}": sum(step.router_losses[name] for step in steps) / len(steps) for name in names}


def _mtp_metrics(steps: Sequence[StepResult[Metrics]]) -> dict[str, float]:
    of_steps = [step.mtp for step in steps if step.mtp is not None]
    if not of_steps:
        return {}
    layers = enumerate(torch.stack(of_steps).mean(0).tolist(), start=1)
    return {
        name: value
        for layer, (loss, accuracy) in layers
        for name, value in ((f"mtp/loss/layer_{layer}", loss), (f"mtp/accuracy/layer_{layer}", accuracy))
    }
