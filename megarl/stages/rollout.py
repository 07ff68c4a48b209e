"""Prompts to trajectories: the engines sample responses."""

from collections.abc import Sequence

import numpy as np

from megarl.cluster.engine_group import EngineGroup
from megarl.config.schema import MegarlConfig
from megarl.data import Prompt, Trajectory
from megarl.rollout.protocol import Request, SamplingParameters


def sampling_parameters(config: MegarlConfig, stop_token_ids: tuple[int, ...], step: int) -> list[SamplingParameters]:
    """Parameters for each prompt of a step.

    Each has a seed of its own, made from the run's seed, the step and its place: what is sampled doesn't depend on how
    the prompts are spread over engines, and a resumed run samples what the interrupted one would have.
    """
    rollout, count = config.rollout, config.loop.prompts_per_step
    seeds = np.random.SeedSequence((config.loop.seed, step)).generate_state(count).tolist()
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
    engines: EngineGroup, prompts: Sequence[Prompt], sampling: Sequence[SamplingParameters]
) -> list[Trajectory]:
    """Sample responses to every prompt, with the parameters in its place; samples of one prompt are neighbours."""
    requests = [
        Request(prompt_token_ids=prompt.token_ids, sampling=parameters)
        for prompt, parameters in zip(prompts, sampling, strict=True)
    ]
    return [
        Trajectory(
            prompt=prompt,
            group=group,
            token_ids=generation.token_ids,
            log_probs=generation.log_probs,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
        )
        for group, (prompt, generations) in enumerate(zip(prompts, engines.generate(requests), strict=True))
        for generation in generations
    ]


def response_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """What there is to say about the responses before they are scored; `version` is that of the newest weights."""
    lengths = np.array([len(trajectory.token_ids) for trajectory in trajectories])
    oldest = np.array([min(trajectory.versions, default=version) for trajectory in trajectories])
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/cut_fraction": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "staleness/mean": float((version - oldest).mean()),
    }
