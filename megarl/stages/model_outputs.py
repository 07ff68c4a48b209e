"""Predictions of the models for the tokens of a batch: only those that the algorithm needs."""

from collections.abc import Sequence

from megarl.algorithms import ADVANTAGES, PolicyObjective, Source, implicit_process_rewards
from megarl.cluster.trainer.batch import REFERENCE, Batch, fetch_tensor, sequences_of
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.data import PromptGroup, prompt_of_each
from megarl.data.stretches import Values
from megarl.models.auxiliary import AuxiliaryModels
from megarl.schema import MegarlConfig
from megarl.stages.fields import with_fields


def policy_predictions(objective: PolicyObjective, *, has_teachers: bool) -> list[str]:
    """Names of the predictions that a step asks the policy for before its first update.

    The policy's own log-probs are computed only if more than the loss of a single update needs them. In a single update
    the policy has not changed yet, so the log-probs of its forward pass already are the old ones. A loss whose ratio is
    to the rollout's log-probs never needs them.
    """
    algorithm = objective.algorithm
    estimator = ADVANTAGES[algorithm.advantage]
    several = algorithm.updates_per_step > 1 and algorithm.ratio_to == "old"
    names = [f"{REFERENCE}log_probs"] if objective.needs_reference else []
    if several or Source.OLD_POLICY in estimator.sources or has_teachers or objective.has_kl_in("reward"):
        names += ["log_probs", *(["probability_squares"] if "probability_squares" in estimator.needs else [])]
    return names


def policy_passes(objective: PolicyObjective, *, has_teachers: bool) -> int:
    """Count the forward passes for `policy_predictions`: at most one of the policy and one of the reference."""
    return len({name.startswith(REFERENCE) for name in policy_predictions(objective, has_teachers=has_teachers)})


def with_model_outputs(
    batch: Batch,
    groups: Sequence[PromptGroup],
    policy: TrainerGroup,
    auxiliary: AuxiliaryModels,
    objective: PolicyObjective,
    config: MegarlConfig,
) -> Batch:
    """Add a field for each prediction that the advantages, the rewards or the loss need.

    Predictions stay in the store of the ranks that made them.
    """
    temperature = config.rollout.temperature
    fields: dict[str, Sequence[Values]] = {}
    if names := policy_predictions(objective, has_teachers=bool(auxiliary.teachers)):
        fields |= policy.predictions(batch, names, temperature=temperature, replay=True)
    if "log_probs" in fields:
        fields["old_log_probs"] = fields.pop("log_probs")
    if auxiliary.critic is not None:
        fields["old_values"] = auxiliary.critic.values(batch)
    if auxiliary.teachers:
        fields["teacher_log_probs"] = _teacher_log_probs(batch, groups, auxiliary, temperature)
    if auxiliary.implicit_reward_model is not None:
        model = auxiliary.implicit_reward_model
        now, before = model.predictions(batch, ["log_probs", "reference_log_probs"], temperature=1.0).values()
        beta = config.implicit_reward_model.beta
        rewards = implicit_process_rewards(fetch_tensor(now), fetch_tensor(before), beta)
        fields["implicit_reference_log_probs"] = before
        fields["process_rewards"] = sequences_of(rewards, batch.lengths)
    return with_fields(batch, **fields)


def _teacher_log_probs(
    batch: Batch, groups: Sequence[PromptGroup], auxiliary: AuxiliaryModels, temperature: float
) -> list[Values]:
    """Log-probs of each sequence under the teacher of its data source."""
    prompts = prompt_of_each(groups)
    found: dict[int, Values] = {}
    for teacher in auxiliary.teachers.values():
        taught = [index for index, prompt in enumerate(prompts) if teacher.teaches(prompt)]
        if taught:
            log_probs = teacher.group.log_probs(batch.select(taught), temperature=temperature)
            found |= dict(zip(taught, log_probs, strict=True))
    return [found[index] for index in range(len(prompts))]
