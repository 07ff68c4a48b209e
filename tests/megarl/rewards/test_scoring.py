"""Results to scores, and samples to scores in their order; what hangs and what dies is in test_scorer."""

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import failures

from megarl.rewards import RewardFailed, Score, Scorer, reward_arguments
from megarl.rewards.scoring import as_score
from megarl.schema import RewardConfig

FUNCTIONS = Path(__file__).parents[1] / "reward_functions.py"
PLAIN_AND_ASYNC = ("as_number", "as_number_later")


def sample(solution, ground_truth="truth", **extra_info):
    return reward_arguments("source", solution, ground_truth, extra_info or {"index": 3})


def scorer_of(name, **config):
    return Scorer(RewardConfig(function=f"{FUNCTIONS}:{name}", **config))


def number(value):
    return Score(value, {"half": value / 2}, {"score": value})


@pytest.fixture(scope="module", params=PLAIN_AND_ASYNC)
def drops(request):
    with scorer_of(request.param, on_error="drop", workers=3, async_samples=3) as scorer:
        yield scorer


@pytest.fixture(scope="module", params=PLAIN_AND_ASYNC)
def stops(request):
    with scorer_of(request.param, workers=1, async_samples=1) as scorer:
        yield scorer


@given(st.lists(st.one_of(st.integers(0, 5), st.just("x")), max_size=20))
@settings(max_examples=15, deadline=None)
def test_scores_come_in_the_order_of_the_samples(drops, values):
    scored = drops.score([sample(str(value)) for value in values])
    assert [each if isinstance(each, Score) else None for each in scored] == [
        None if value == "x" else number(float(value)) for value in values
    ]
    assert failures(scored) == (values.count("x"), 0)


def test_a_function_that_fails_stops_with_the_sample(stops):
    with pytest.raises(RewardFailed) as raised:
        stops.score([sample("2"), sample("x", ground_truth="forty-two"), sample("4")])
    message = str(raised.value)
    for part in ("ValueError", "could not convert", "'source'", "'x'", "'forty-two'", "{'index': 3}", "on_error"):
        assert part in message
    assert stops.score([sample("2")]) == [number(2.0)]


def test_a_plain_function_gets_the_sample_by_name():
    with scorer_of("got_all_by_name", workers=1) as scorer:
        assert scorer.score([sample("text")])[0].value == 1.0


def test_as_many_async_functions_run_at_once_as_are_asked_for():
    with scorer_of("at_once", workers=8, async_samples=3, timeout_s=20.0, on_timeout="stop") as scorer:
        assert max(score.value for score in scorer.score([sample("")] * 12)) == 3


def test_an_async_function_that_raises_is_the_cause_of_the_failure():
    with scorer_of("notes_and_fails") as scorer, pytest.raises(RewardFailed) as raised:
        scorer.score([sample("1", begun=[])])
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_async_function_that_gives_no_number_fails():
    with scorer_of("text") as scorer, pytest.raises(RewardFailed, match="must be a finite number, found '1'"):
        scorer.score([sample("1")])


def test_the_first_failure_in_order_is_raised_and_nothing_begins_after_it():
    begun = []
    with scorer_of("notes_and_fails", async_samples=2) as scorer, pytest.raises(RewardFailed, match="RuntimeError: 0"):
        scorer.score([sample(str(number), begun=begun) for number in range(50)])
    assert len(begun) < 50


def test_an_async_function_ends_when_it_is_cancelled():
    begun, ended = threading.Event(), threading.Event()
    with scorer_of("notes_and_waits") as scorer:
        pending = scorer.begin()
        pending.add({0: sample("", begun=begun, ended=ended, seconds=99)})
        assert begun.wait(30)
        pending.cancel()
        assert ended.wait(30)


@pytest.mark.parametrize("result", [2, 2.0, np.float32(2), np.int64(2), {"score": 2.0}])
def test_any_real_number_is_a_score(result):
    score = as_score(result)
    assert score == Score(2.0)
    assert type(score.value) is float


def test_other_numbers_of_a_mapping_are_named_parts():
    result = {"score": 0.5, "format": 1, "verified": True, "close": np.bool_(1), "answer": "text", "trace": [1]}
    assert as_score(result) == Score(0.5, {"format": 1.0, "verified": 1.0, "close": 1.0})


def test_a_truth_value_of_numpy_is_a_score():
    assert [as_score(np.float32(2) > limit) for limit in (1, 3)] == [Score(1.0), Score(0.0)]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (float("nan"), "'score' must be a finite number, found nan"),
        (float("inf"), "'score' must be a finite number, found inf"),
        (None, "'score' must be a finite number, found None"),
        (10**400, "'score' must be a finite number, found 1000"),
        pytest.param(10**5000, "'score' must be a finite number, found a long int", id="5001 digits"),
        (torch.tensor(0.5), "'score' must be a finite number, found tensor"),
        ("1", "'score' must be a finite number, found '1'"),
        ({"score": None}, "'score' must be a finite number, found None"),
        ({"accuracy": 1.0}, r"has no 'score', only \['accuracy'\]"),
        ({"score": 1.0, "format": float("nan")}, "'format' must be a finite number, found nan"),
    ],
)
def test_a_result_that_is_no_number_is_no_score(result, said):
    with pytest.raises(ValueError, match=said):
        as_score(result)


def test_a_long_solution_is_cut_in_the_message():
    with pytest.raises(RewardFailed, match=r"first 500 of 600 characters\): 'x{500}'\n"):
        raise RewardFailed(sample("x" * 600), "it raised")


def test_a_failure_survives_the_way_between_processes():
    failed = RewardFailed(sample("text"), "it raised")
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), again.arguments) == (str(failed), failed.arguments)
