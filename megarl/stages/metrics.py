"""Metrics of the data of a step: responses, rewards, groups and advantages."""

from collections.abc import Sequence

from megarl.data import PromptGroup
from megarl.diagnostics import advantage_metrics, group_metrics, response_metrics, reward_metrics
from megarl.schema import MegarlConfig
from megarl.stages.advantage import kl_to_teachers
from megarl.stages.batch import trained_responses
from megarl.tracking import MetricValue
from megatron_ext.packing import RaggedBatch


def step_metrics(
    sampled: Sequence[PromptGroup], batch: RaggedBatch, version: int, config: MegarlConfig
) -> dict[str, MetricValue]:
    """Metrics of all that was `sampled`, and of the advantages of what is trained on, the `batch`.

    `version` is that of the weights that begin the step.
    """
    trajectories = [each for group in sampled for each in group.trajectories]
    rewards = [group.only_scored().rewards for group in sampled]
    advantages = batch.fields["advantages"][batch.fields["trained"]]
    to_teachers = kl_to_teachers(batch)
    return {
        **response_metrics(trajectories, version, config.rollout.max_response_tokens),
        **reward_metrics(sampled),
        **group_metrics([each for each in rewards if each]),
        **advantage_metrics(advantages.numpy(), trained_responses(batch).lengths.numpy()),
        **({} if to_teachers is None else {"distillation/kl": to_teachers}),
    }
