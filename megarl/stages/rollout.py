"""Turn drawn prompts into requests to the engines, and the answers into groups."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.data import PromptGroup, Trajectory, Turn
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.schema import MegarlConfig

# Keeps the seeds of rollouts apart from others derived from loop.seed and a number.
_ROLLOUT = 0x5A3B


def sampling_parameters(
    config: MegarlConfig, stop_token_ids: tuple[int, ...], ordinals: Sequence[int]
) -> list[SamplingParameters]:
    """Sampling parameters for the prompts drawn with these `ordinals`.

    Each prompt's seed is derived from the run's seed and its ordinal alone, and the random stream of each sample from
    that seed. So no token depends on the step or the engine that samples a prompt, on how prompts are spread over
    engines, or on whether the run was interrupted.
    """
    rollout, samples = config.rollout, config.loop.samples_per_prompt
    return [
        SamplingParameters(
            samples=samples,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=stop_token_ids,
            seed=_seed(config.loop.seed, ordinal),
        )
        for ordinal in ordinals
    ]


def requests_for(
    groups: Sequence[PromptGroup], sampling: Sequence[SamplingParameters], *, with_baselines: bool
) -> list[Request]:
    """One request per group; `with_baselines`, followed by one per group for a greedy response."""
    requests = [
        Request(list(group.prompt.token_ids), parameters, priority=group.ordinal, conversation=group.ordinal)
        for group, parameters in zip(groups, sampling, strict=True)
    ]
    greedy = [replace(each, sampling=_greedy(each.sampling)) for each in requests] if with_baselines else []
    return requests + greedy


def with_answers(group: PromptGroup, answers: Sequence[Sequence[Turn]]) -> PromptGroup:
    """Fill the group with its samples: `answers` to its request and, if it has one, to its greedy request."""
    trajectories, *greedy = ([Trajectory((turn,), turn.finish_reason) for turn in turns] for turns in answers)
    return group.with_members(trajectories, greedy[0][0] if greedy else None)


def _seed(seed: int, ordinal: int) -> int:
    """A number in [0, 2^63)."""
    return int(np.random.SeedSequence((seed, ordinal, _ROLLOUT)).generate_state(1, np.uint64)[0]) >> 1


def _greedy(sampling: SamplingParameters) -> SamplingParameters:
    """Parameters for one greedy response to the same prompt."""
    return replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1, seed=None)
