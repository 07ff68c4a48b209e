"""Metrics of one step's responses, groups, advantages and ratios."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.policy_losses.ratios import RATIO_EDGES, ratio_counts
from megarl.data import Trajectory, Turn
from megarl.diagnostics.advantages import AdvantageStretches, advantage_metrics
from megarl.diagnostics.step import (
    group_metrics,
    length_edges,
    prefix_cache_metrics,
    response_metrics,
)
from megarl.tracking import Histogram


def response(length: int, *, oldest: int = 5, cut: bool = False) -> Trajectory:
    versions = [oldest] * min(length, 1) + [7] * (length - 1)
    turn = Turn.of([1], [2] * length, [0.0] * length, versions, "length" if cut else "stop")
    return Trajectory((turn,), turn.finish_reason)


def test_responses_are_told_by_their_lengths_and_ages():
    found = response_metrics([response(3), response(8, oldest=4, cut=True), response(5, oldest=7)], 8, max_tokens=8)
    histogram = found.pop("response_length/histogram")
    assert histogram == Histogram(tuple(x - 0.5 for x in range(10)), (0, 0, 0, 1, 0, 1, 0, 0, 1))
    assert found == pytest.approx(
        {
            "response_length/mean": 16 / 3,
            "response_length/max": 8,
            "response_length/min": 3,
            "response_length/median": 5,
            "response_length/p90": 7.4,
            "response_length/p99": 7.94,
            "response_length/truncated_fraction": 1 / 3,
            "staleness/mean": (3 + 4 + 1) / 3,
            "staleness/max": 4,
            "staleness/in_flight": (2 + 3 + 0) / 3,
            "staleness/in_queue": 1,
        }
    )


def test_a_response_without_a_token_has_a_length_and_no_age():
    found = response_metrics([response(0)], 7, max_tokens=4)
    assert (found["response_length/max"], found["staleness/max"]) == (0, 0)
    assert found["response_length/histogram"].counts[0] == 1


def test_cached_prefixes_are_counted_by_turns_and_where_the_engine_says_so():
    def turn(prompt: int, sampled: int, cached: int | None) -> Turn:
        return Turn.of([1] * prompt, [2] * sampled, [0.0] * sampled, [7] * sampled, "stop", cached_tokens=cached)

    conversations = [(turn(40, 10, 32), turn(6, 4, 48), turn(20, 4, None)), (turn(40, 3, 0),), (turn(40, 3, None),)]
    found = prefix_cache_metrics([Trajectory(turns, "stop") for turns in conversations])
    assert found == {
        "throughput/prefix_cached_first_turns": 32 / 80,
        "throughput/prefix_cached_later_turns": 48 / 56,
    }
    assert prefix_cache_metrics([Trajectory((turn(40, 3, None),), "stop")]) == {}


@given(st.integers(1, 100_000))
def test_bins_of_lengths_are_few_and_equal_and_hold_every_length(max_tokens):
    edges = length_edges(max_tokens)
    assert len(edges) - 1 <= 32
    assert len({high - low for low, high in pairwise(edges)}) == 1
    assert edges[0] < 0
    assert max_tokens < edges[-1] < max_tokens + edges[1] - edges[0]
    assert all(edge % 1 == 0.5 for edge in edges)


def test_groups_are_counted_once_whatever_their_size():
    assert group_metrics([[1, 1], [0, 0, 0], [1], [0.7, 0.9]]) == {
        "groups/no_signal": 0.75,
        "groups/all_right": 0.75,
        "groups/all_wrong": 0.25,
    }
    assert group_metrics([[0.5, 1.0]]) == {"groups/no_signal": 0, "groups/all_right": 0, "groups/all_wrong": 0}
    assert group_metrics([[0.5, 0.0]]) == {"groups/no_signal": 0, "groups/all_right": 0, "groups/all_wrong": 1}


def test_advantages_are_told_by_their_moments_and_signs():
    # Three responses of 1, 0 and 5 tokens; the last one is told in two stretches.
    equal = AdvantageStretches.of_equal(np.array([2.0, 0.0]), np.array([1.0, 1.0]), np.array([0, 2]))
    different = AdvantageStretches.of_different([(2, np.float32([-1, 3, 3, 0]))])
    assert advantage_metrics(equal + different) == pytest.approx(
        {
            "advantage/mean": 7 / 6,
            "advantage/response_mean": (2 + 5 / 5) / 2,
            "advantage/std": math.sqrt(23 / 6 - (7 / 6) ** 2),
            "advantage/max": 3.0,
            "advantage/min": -1.0,
            "advantage/positive_fraction": 0.5,
            "advantage/zero_fraction": 1 / 3,
        }
    )
    assert advantage_metrics(AdvantageStretches.of_different([])) == {}


def test_the_deviation_of_large_advantages_that_are_nearly_the_same_is_kept():
    values = 1e6 + np.float32([0, 1, 0, 1])
    stretches = AdvantageStretches.of_different([(0, values[:2]), (1, values[2:])])
    assert advantage_metrics(stretches)["advantage/std"] == 0.5


@given(st.lists(st.floats(-5, 5, width=32), max_size=50), st.integers(0, 50))
def test_ratios_are_counted_alike_whole_and_in_pieces(log_ratios, cut):
    values = torch.tensor(log_ratios, requires_grad=True)
    counts = ratio_counts(values)
    assert not counts.counts.requires_grad
    pieces = ratio_counts(values[:cut]) + ratio_counts(values[cut:])
    assert counts.value == pieces.value
    expected = Histogram.of(np.array(log_ratios), [math.log(edge) for edge in RATIO_EDGES])
    assert counts.value.counts == expected.counts


def test_the_middle_bin_is_around_one():
    counts = ratio_counts(torch.tensor([0.0, 0.0009, -0.0009, 0.002])).value.counts
    middle = len(counts) // 2
    assert (counts[middle], counts[middle + 1], sum(counts)) == (3, 1, 4)
    assert RATIO_EDGES[middle] < 1 < RATIO_EDGES[middle + 1]
