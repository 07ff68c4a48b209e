import asyncio
import pickle
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.config.schema import RewardConfig
from megarl.rewards import RewardFailed, RewardSample, Score, Scorer


def sample(solution, ground_truth="truth"):
    return RewardSample("source", solution, ground_truth, {"index": 3})


def score(function, samples, *, workers=4, on_error="stop"):
    with Scorer.of_function(function, RewardConfig(workers=workers, on_error=on_error)) as scorer:
        return [plain(score) for score in scorer.score(samples).scores]


def plain(score):
    return score and Score(score.value, score.parts)


def as_number(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str)


async def as_number_later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(float(solution_str) / 1000)
    return float(solution_str)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 6), st.sampled_from([as_number, as_number_later]))
@settings(max_examples=25, deadline=None)
def test_scores_come_in_the_order_of_the_samples(values, workers, function):
    scores = score(function, [sample(str(value)) for value in values], workers=workers)
    assert scores == [Score(float(value)) for value in values]


def test_the_function_gets_the_sample_by_name():
    def check(*, extra_info, ground_truth, solution_str, data_source):
        return float((data_source, solution_str, ground_truth, extra_info) == ("source", "text", "truth", {"index": 3}))

    assert score(check, [sample("text")]) == [Score(1.0)]


def test_at_most_so_many_workers_run_at_once_and_they_do_run_at_once():
    lock, running, most = threading.Lock(), 0, 0
    three_together = threading.Barrier(3, timeout=30)

    def count(**sample):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three_together.wait()
        with lock:
            running -= 1
        return 0.0

    score(count, [sample("")] * 12, workers=3)
    assert most == 3


def test_async_functions_share_a_loop():
    met = asyncio.Barrier(2)

    async def meet(**sample):
        await asyncio.wait_for(met.wait(), 30)
        return 1.0

    assert score(meet, [sample("")] * 2, workers=2) == [Score(1.0)] * 2


@pytest.mark.parametrize("result", [2, 2.0, np.float32(2), np.int64(2), {"score": 2.0}])
def test_any_real_number_is_a_score(result):
    assert score(lambda **_: result, [sample("")]) == [Score(2.0)]


def test_other_numbers_of_a_mapping_are_named_parts():
    result = {"score": 0.5, "format": 1, "verified": True, "answer": "text", "trace": [1]}
    assert score(lambda **_: result, [sample("")]) == [Score(0.5, {"format": 1.0, "verified": 1.0})]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (float("nan"), "'score' must be a finite number, found nan"),
        (float("inf"), "'score' must be a finite number, found inf"),
        (None, "'score' must be a finite number, found None"),
        ("1", "'score' must be a finite number, found '1'"),
        ({"score": None}, "'score' must be a finite number, found None"),
        ({"accuracy": 1.0}, r"has no 'score', only \['accuracy'\]"),
        ({"score": 1.0, "format": float("nan")}, "'format' must be a finite number, found nan"),
    ],
)
def test_a_result_that_is_no_number_fails(result, said):
    with pytest.raises(RewardFailed, match=said):
        score(lambda **_: result, [sample("")])
    assert score(lambda **_: result, [sample("")], on_error="drop") == [None]


def divide(data_source, solution_str, ground_truth, extra_info):
    return 1 / float(solution_str)


async def divide_later(data_source, solution_str, ground_truth, extra_info):
    return 1 / float(solution_str)


@pytest.mark.parametrize("function", [divide, divide_later])
def test_a_function_that_raises_stops_with_the_sample(function):
    with pytest.raises(RewardFailed) as raised:
        score(function, [sample("2"), sample("0", ground_truth="forty-two"), sample("4")])
    message = str(raised.value)
    for part in ("ZeroDivisionError", "division by zero", "'source'", "'0'", "'forty-two'", "{'index': 3}", "on_error"):
        assert part in message
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("function", [divide, divide_later])
def test_a_function_that_raises_drops_the_sample(function):
    scores = score(function, [sample("2"), sample("0"), sample("4")], on_error="drop")
    assert scores == [Score(0.5), None, Score(0.25)]


def test_a_long_solution_is_cut_in_the_message():
    with pytest.raises(RewardFailed, match=r"first 500 of 600 characters\): 'x{500}'\n"):
        score(divide, [sample("x" * 600)])


def test_the_first_failure_in_order_is_raised_and_nothing_begins_after_it():
    begun = []

    def fail(solution_str, **rest):
        begun.append(solution_str)
        if solution_str == "0":
            time.sleep(0.05)
        raise RuntimeError(solution_str)

    with pytest.raises(RewardFailed, match="RuntimeError: 0"):
        score(fail, [sample(str(number)) for number in range(50)], workers=2)
    assert len(begun) < 50


def test_a_failure_survives_the_way_between_processes():
    failed = RewardFailed(sample("text"), "it raised")
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), again.sample) == (str(failed), failed.sample)


def test_an_unknown_way_to_treat_errors_is_refused():
    with pytest.raises(UserError, match=r"reward\.on_error is 'zero'"):
        score(as_number, [], on_error="zero")
