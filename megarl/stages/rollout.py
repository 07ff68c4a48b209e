"""Drawn prompts to groups: the engines sample trajectories."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megarl.cluster.engine_group import EngineGroup
from megarl.data import PromptGroup, Trajectory, Turn
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.schema import MegarlConfig


def sampling_parameters(
    config: MegarlConfig, stop_token_ids: tuple[int, ...], step: int, *, count: int, refill: int = 0
) -> list[SamplingParameters]:
    """Parameters for each of `count` prompts of a step, or of its `refill`-th further rollout.

    Each has a seed of its own, made from the run's seed, the step and its place: what is sampled doesn't depend on how
    the prompts are spread over engines, and a resumed run samples what the interrupted one would have.
    """
    rollout = config.rollout
    entropy = (config.loop.seed, step, refill) if refill else (config.loop.seed, step)
    seeds = np.random.SeedSequence(entropy).generate_state(count).tolist()
    return [
        SamplingParameters(
            samples=config.loop.samples_per_prompt,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )
        for seed in seeds
    ]


def rollout(
    engines: EngineGroup,
    groups: Sequence[PromptGroup],
    sampling: Sequence[SamplingParameters],
    *,
    with_baselines: bool = False,
) -> Iterator[PromptGroup]:
    """Sample the trajectories of every group, with the parameters in its place; `with_baselines` a greedy one more.

    Each group comes as soon as it is finished, in any order, while the engines go on with the others.
    """
    requests = [Request(group.prompt.token_ids, parameters) for group, parameters in zip(groups, sampling, strict=True)]
    if with_baselines:
        requests += [Request(request.prompt_token_ids, _greedy(request.sampling)) for request in requests]
    answers: dict[int, list[Trajectory]] = {}
    for place, turns in engines.generate_each(requests):
        answers[place] = list(map(_of_one_turn, turns))
        own = range(place % len(groups), len(requests), len(groups))
        if all(part in answers for part in own):
            trajectories, *greedy = (answers.pop(part) for part in own)
            yield groups[own.start].with_members(trajectories, greedy[0][0] if greedy else None)


def _of_one_turn(turn: Turn) -> Trajectory:
    return Trajectory((turn,), turn.finish_reason)


def _greedy(sampling: SamplingParameters) -> SamplingParameters:
    """One response to the same prompt, the likeliest token by token."""
    return replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1, seed=None)
