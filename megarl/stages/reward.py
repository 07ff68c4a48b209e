"""Trajectories to scored trajectories."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from converters.errors import UserError
from megarl.config.schema import RewardConfig
from megarl.data import Trajectory
from megarl.rewards import RewardFunction, RewardSample, score_all


def reward(
    function: RewardFunction,
    trajectories: Sequence[Trajectory],
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
) -> list[Trajectory]:
    """Score every response; those whose reward failed are left out if `config.on_error` says drop.

    The text that is scored leaves special tokens out; what is trained on stays the sampled tokens. Raises RewardFailed
    with the sample if a reward failed and is not to be dropped, UserError if none is left.
    """
    texts = tokenizer.batch_decode([t.token_ids for t in trajectories], skip_special_tokens=True)
    samples = [
        RewardSample(
            data_source=trajectory.prompt.data_source,
            solution=text,
            ground_truth=trajectory.prompt.ground_truth,
            extra_info=trajectory.prompt.extra_info,
        )
        for trajectory, text in zip(trajectories, texts, strict=True)
    ]
    scores = asyncio.run(score_all(function, samples, workers=config.workers, on_error=config.on_error))
    scored = [
        replace(trajectory, score=score)
        for trajectory, score in zip(trajectories, scores, strict=True)
        if score is not None
    ]
    if not scored:
        raise UserError(
            f"the reward function failed for all {len(trajectories)} responses, and reward.on_error=drop leaves none: "
            "repair it (with reward.on_error=stop the first failure is shown)"
        )
    return scored


def reward_metrics(scored: Sequence[Trajectory], dropped: int) -> dict[str, float]:
    """Statistics of the rewards and of their named parts."""
    rewards = np.array([trajectory.reward for trajectory in scored])
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        for name, value in trajectory.scored.parts.items():
            parts[name].append(value)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "reward/dropped": float(dropped),
        **{f"reward/part/{name}": float(np.mean(values)) for name, values in parts.items()},
    }
