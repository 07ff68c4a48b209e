import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.rewards.math_reward import MathReward

FOREVER = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def reward():
    return MathReward(processes=1)


def score(reward, solution, ground_truth):
    return reward(data_source="math", solution_str=solution, ground_truth=ground_truth, extra_info={})


@pytest.mark.parametrize(
    ("solution", "ground_truth", "value"),
    [
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}", 1.0),
        (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", 1.0),
        (r"\boxed{\{2, 1\}}", r"$\{1, 2\}$", 1.0),
        ("the answer is 7", "7", 1.0),
        ("the answer is 7", "8", 0.0),
        (r"\boxed{x}", "y", 0.0),
        (r"\boxed{\frac{1}{", "3", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        ("line\nbreaks \u2028 and \x00 too: \\boxed{3}", 3, 1.0),
    ],
)
def test_equality_is_mathematical(reward, solution, ground_truth, value):
    assert score(reward, solution, ground_truth) == {"score": value, "unchecked": 0.0}


def test_a_ground_truth_without_mathematics_is_an_error(reward):
    with pytest.raises(ValueError, match="cannot parse the ground truth ''"):
        score(reward, "7", "")
    assert score(reward, "7", "7")["score"] == 1.0


def test_an_endless_comparison_is_ended_and_counted():
    reward = MathReward(timeout_s=1.0, processes=1)
    assert score(reward, FOREVER, "7") == {"score": 0.0, "unchecked": 1.0}
    assert score(reward, "7", "7") == {"score": 1.0, "unchecked": 0.0}


def test_a_process_that_died_between_two_samples_is_replaced():
    reward = MathReward(processes=1)
    score(reward, "7", "7")
    (checker,) = reward._idle
    checker.kill()
    checker.wait()
    assert score(reward, "7", "7") == {"score": 1.0, "unchecked": 0.0}


def test_threads_share_the_processes():
    reward = MathReward(processes=2)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: score(reward, f"it is {number}", str(number % 5)), range(20)))
    assert [result["score"] for result in results] == [float(number < 5) for number in range(20)]
    assert 1 <= len(reward._idle) <= 2
    assert threading.active_count() < 8


def test_the_processes_end_with_the_reward():
    reward = MathReward(processes=1)
    score(reward, "7", "7")
    pid = reward._idle[0].pid
    os.kill(pid, 0)
    del reward
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
