"""Metrics of the data of a step: responses, rewards, groups and advantages."""

from collections.abc import Sequence

from megarl.cluster.trainer.batch import Batch
from megarl.data import PromptGroup, trajectories_of
from megarl.diagnostics import (
    advantage_metrics,
    group_metrics,
    prefix_cache_metrics,
    response_metrics,
    reward_metrics,
)
from megarl.schema import MegarlConfig
from megarl.stages.advantage import kl_to_teachers
from megarl.stages.batch import advantage_stretches
from megarl.stages.filtering import left_out
from megarl.tracking import MetricValue


def step_metrics(
    sampled: Sequence[PromptGroup], trained: Sequence[PromptGroup], batch: Batch, version: int, config: MegarlConfig
) -> dict[str, MetricValue]:
    """Metrics of the `sampled` groups, and of the advantages in `batch`, which is made of the `trained` groups.

    `version` is the version of the weights at the beginning of the step.
    """
    trajectories = trajectories_of(sampled)
    rewards = [group.only_scored().rewards for group in sampled]
    to_teachers = kl_to_teachers(batch)
    return {
        **response_metrics(trajectories, version, config.rollout.max_response_tokens),
        **prefix_cache_metrics(trajectories),
        **reward_metrics(sampled),
        **group_metrics([each for each in rewards if each]),
        "groups/left_out": left_out(sampled, trained),
        **advantage_metrics(advantage_stretches(batch)),
        **({} if to_teachers is None else {"distillation/kl": to_teachers}),
    }
