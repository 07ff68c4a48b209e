"""Trajectories made by hand."""

from typing import Literal

from megarl.data import Prompt, Trajectory, Turn
from megarl.rewards import Score
from megarl.schema import RolloutConfig

SHORT_RUN = RolloutConfig(max_response_tokens=4)


def trajectory(
    group: int,
    prompt: list[int],
    response: list[int],
    reward: float,
    finish_reason: Literal["stop", "length"] = "stop",
    baseline: float | None = None,
) -> Trajectory:
    log_probs = [-0.1 * token for token in response]
    return Trajectory(
        prompt=Prompt(0, "source", prompt, "truth", {}),
        group=group,
        turns=(Turn.of(prompt, response, log_probs, [3] * len(response), finish_reason),),
        score=Score(reward, {}, {"score": reward}),
        baseline_reward=baseline,
    )
