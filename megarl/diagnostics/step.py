"""Metrics of a step: its responses, groups and rewards, and the load of MoE experts."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megarl.data import PromptGroup, Trajectory
from megarl.data.stretches import distinct
from megarl.tracking import Histogram, MetricValue

_BINS = 32
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def response_metrics(trajectories: Sequence[Trajectory], version: int, max_tokens: int) -> dict[str, MetricValue]:
    """Response lengths in tokens, the fraction truncated at `max_tokens`, and the age of each response's oldest token.

    `version` is the newest weight version. `trajectories` must not be empty.
    """
    lengths = np.array([trajectory.sampled_tokens for trajectory in trajectories])
    oldest, newest = np.array([_oldest_and_newest(trajectory, version) for trajectory in trajectories]).T
    ages = version - oldest
    quantiles = np.quantile(lengths, list(_QUANTILES.values()))
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        **{f"response_length/{name}": float(q) for name, q in zip(_QUANTILES, quantiles, strict=True)},
        "response_length/truncated_fraction": float(np.mean([each.is_truncated for each in trajectories])),
        "response_length/histogram": Histogram.of(lengths, length_edges(max_tokens)),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/in_flight": float((newest - oldest).mean()),
        "staleness/in_queue": float((version - newest).mean()),
    }


def prefix_cache_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Fractions of prompt tokens found in the engine's prefix cache: in first turns, and in later ones.

    Turns for which the engine reports nothing are left out; without any, the metric is omitted.
    """
    cached, all_tokens = Counter[str](), Counter[str]()
    for trajectory in trajectories:
        before = 0
        for place, turn in enumerate(trajectory.turns):
            before += len(turn.prompt_ids)
            if turn.cached_tokens is not None:
                name = f"throughput/prefix_cached_{'later_turns' if place else 'first_turns'}"
                cached[name] += turn.cached_tokens
                all_tokens[name] += before
            before += len(turn.token_ids)
    return {name: cached[name] / tokens for name, tokens in all_tokens.items()}


def _oldest_and_newest(trajectory: Trajectory, of_none: int) -> tuple[int, int]:
    """The versions of the oldest and the newest token; `of_none` if no token was sampled."""
    values = [distinct(turn.versions) for turn in trajectory.turns]
    known = [version for each in values if len(each) for version in (int(each.min()), int(each.max()))]
    return min(known, default=of_none), max(known, default=of_none)


def length_edges(max_tokens: int) -> list[float]:
    """Edges of equal bins for lengths 0 to `max_tokens`: the same at every step, and between integers."""
    width = math.ceil((max_tokens + 1) / _BINS)
    bins = math.ceil((max_tokens + 1) / width)
    return [place * width - 0.5 for place in range(bins + 1)]


RIGHT_ABOVE = 0.5
"""A response counts as right if its reward is above this: half of a verifier's reward for a right answer."""


def group_metrics(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Fractions of the groups: with equal rewards, all right, all wrong.

    `rewards` are those of each group, of which there is at least one. `RIGHT_ABOVE` defines right and wrong.
    """
    lowest, highest = np.array([min(each) for each in rewards]), np.array([max(each) for each in rewards])
    return {
        "groups/no_signal": float(np.mean(lowest == highest)),
        "groups/all_right": float(np.mean(lowest > RIGHT_ABOVE)),
        "groups/all_wrong": float(np.mean(highest <= RIGHT_ABOVE)),
    }


def reward_metrics(sampled: Sequence[PromptGroup]) -> dict[str, float]:
    """Statistics of all rewards, per data source, and of their named parts; at least one reward is needed.

    Failures are counted over everything that was to be scored, greedy baselines included.
    """
    scored = [(group.prompt.data_source, each) for group in sampled for each in group.only_scored().trajectories]
    members = [each for group in sampled for each in group.members]
    failures = [each.failure for each in members]
    rewards = np.array([trajectory.reward for _, trajectory in scored])
    parts: dict[str, list[float]] = defaultdict(list)
    sources: dict[str, list[float]] = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)
    for source, trajectory in scored:
        sources[source].append(trajectory.reward)
        names[source].update(trajectory.scored.parts)
    for source, trajectory in scored:
        # A timed-out response has no parts: count 0 for each, else the means would cover only responses scored in time.
        own = dict.fromkeys(names[source], 0.0) if trajectory.failure == "timed_out" else {}
        for name, value in (own | trajectory.scored.parts).items():
            parts[name].append(value)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "reward/dropped": float(sum(each.score is None for each in members)),
        "reward/timed_out": float(failures.count("timed_out")),
        "reward/timed_out_fraction": failures.count("timed_out") / len(failures),
        "reward/undecided_fraction": sum(map(_is_undecided, members)) / len(members),
        "reward/lost": float(failures.count("lost")),
        **{f"reward/source/{name}/mean": float(np.mean(values)) for name, values in sources.items()},
        **{f"reward/part/{name}": float(np.mean(values)) for name, values in parts.items()},
    }


def _is_undecided(trajectory: Trajectory) -> bool:
    return trajectory.failure == "timed_out" or (trajectory.score is not None and not trajectory.score.is_decided)


def expert_metrics(load: Tensor) -> dict[str, MetricValue]:
    """Metrics of `load` int64[layers, experts], the tokens per expert; layers without tokens are not MoE layers.

    The imbalance of a layer is the load of its busiest expert over the mean: 1 is even. With expert parallelism the
    other ranks wait that much longer. In a layer's histogram each expert is a bin.
    """
    layers = load.sum(1).nonzero().flatten()
    if not len(layers):
        return {}
    loads = load[layers].double()
    imbalance = loads.amax(1) / loads.mean(1)
    return {
        "experts/imbalance_mean": float(imbalance.mean()),
        "experts/imbalance_max": float(imbalance.max()),
        "experts/idle_fraction": float((loads == 0).double().mean()),
        **{f"experts/imbalance/layer_{layer}": float(imbalance[i]) for i, layer in enumerate(layers.tolist())},
        **{f"experts/load/layer_{layer}": Histogram.of_numbered(load[layer].tolist()) for layer in layers.tolist()},
    }


def replay_metrics(replayed: Tensor) -> dict[str, float]:
    """Metrics of router replay, from four counts in `replayed` int64[4].

    They are: replayed choices, choices that differ from the router's own, tokens with replayed choices, and tokens with
    at least one difference.
    """
    choices, changed, tokens, changed_tokens = replayed.tolist()
    if not choices:
        return {}
    return {"experts/changed_by_replay": changed / choices, "experts/tokens_changed_by_replay": changed_tokens / tokens}
