"""Prompts to trajectories: the engines sample responses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megarl.cluster.engine_group import EngineGroup
from megarl.data import Prompt, Trajectory, Turn
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


def greedy(sampling: SamplingParameters) -> SamplingParameters:
    """One response to the same prompt, the likeliest token by token."""
    return replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1, seed=None)


def rollout(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParameters],
    on_finished: Callable[[list[Trajectory]], None] = lambda _trajectories: None,
) -> list[Trajectory]:
    """Sample responses to every prompt, with the parameters in its place; samples of one prompt are neighbours.

    `on_finished` gets the responses of each prompt as soon as they are finished, in any order, while the engines go on
    with the others.
    """
    requests = [
        Request(prompt_token_ids=prompt.token_ids, sampling=parameters)
        for prompt, parameters in zip(prompts, sampling, strict=True)
    ]
    groups: dict[int, list[Trajectory]] = {}
    for place, turns in engines.generate_each(requests):
        groups[place] = [_trajectory(prompts[place], place, turn) for turn in turns]
        on_finished(groups[place])
    return [trajectory for place in range(len(prompts)) for trajectory in groups[place]]


def _trajectory(prompt: Prompt, group: int, turn: Turn) -> Trajectory:
    return Trajectory(prompt=prompt, group=group, turns=(turn,))


def sequences(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Prompts and responses end to end: tokens long[T], and the length of each pair long[N]."""
    pieces = [piece for each in trajectories for turn in each.turns for piece in (turn.prompt_ids, turn.token_ids)]
    lengths = [sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in each.turns) for each in trajectories]
    return torch.from_numpy(np.concatenate(pieces, dtype=np.int64)), torch.tensor(lengths)
