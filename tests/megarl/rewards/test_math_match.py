from dataclasses import replace

import pytest

from megarl.rewards import REWARDS, RewardTimedOut, Score, Scorer, reward_arguments
from megarl.rewards.math_match import math
from megarl.schema import RewardConfig

FOREVER = r"\boxed{9^{9^{9^{9}}}}"


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
        (r"\boxed{204}\boxed{205}", "205", 1.0),
        (r"\boxed{204}\boxed{205}", "204", 0.0),
        (r"\boxed{205}, wait \boxed{204}", "204", 1.0),
        (r"\boxed{205} and \boxed{204}", "204", 1.0),
        (r"\boxed{205} and \boxed{204}", "205", 0.0),
        (r"\boxed{5} and \boxed{4}", "4, 5", 1.0),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1,2,3", 1.0),
        (r"\boxed{5} and then \boxed{1, 2}", "1,2", 1.0),
        (r"\boxed{\boxed{204}}", "204", 1.0),
        (r"\boxed {204.}", "204", 1.0),
        (r"I write \boxed{}. So $x = 7$, the answer is 7", "7", 1.0),
        (r"the answer is \boxed{7}; as asked for, it is in \boxed{}", "7", 1.0),
        (r"\boxed{7} or \boxed{8", "7", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50}", r"50\%", 1.0),
        (r"\boxed{50%}", "50%", 1.0),
        (r"\boxed{\$18.90}", "18.90", 1.0),
        (r"\boxed{18.9}", r"\$18.90", 1.0),
        (r"it costs \$18.90", r"\$18.90", 1.0),
        (r"\boxed{[0, \infty)}", r"[0,\infty)", 1.0),
        (r"\boxed{\frac{1}{", "3", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        ("line\nbreaks \u2028 and \x00 too: \\boxed{3}", 3, 1.0),
    ],
)
def test_equality_is_mathematical(solution, ground_truth, value):
    assert math("math", solution, ground_truth) == {"score": value, "unchecked": 0.0}


def test_a_ground_truth_without_mathematics_is_an_error():
    with pytest.raises(ValueError, match="cannot parse the ground truth ''"):
        math("math", "7", "")


@pytest.mark.parametrize("piece", ["\\( ", "\\boxed{", "$", "\\boxed{1}, ", "the answer is $", "\\boxed {"])
def test_long_responses_are_read_in_one_pass(piece):
    # With the square of the length, any of these would run into the time limit of the tests.
    assert math("math", piece * (2**20 // len(piece)), "7")["score"] == 0.0
    assert math("math", f"\\boxed{{{piece * 2**15}}}", "7")["score"] == 0.0


@pytest.mark.parametrize("on_timeout", ["zero", "drop"])
def test_an_endless_comparison_is_ended_by_the_timeout_of_the_sample(on_timeout):
    with Scorer(RewardConfig(function="math", workers=1, timeout_s=2.0, on_timeout=on_timeout)) as scorer:
        scored = scorer.score([reward_arguments("math", text, "7", {}) for text in (FOREVER, "it is 7")])
    assert [type(each) for each in scored] == [RewardTimedOut, Score]


@pytest.mark.long
def test_an_endless_comparison_is_ended_by_the_limit_of_the_reward_and_scored_zero(monkeypatch):
    monkeypatch.setitem(REWARDS, "math", replace(REWARDS["math"], limit_s=5.0))
    with Scorer(RewardConfig(function="math", workers=1, on_timeout="stop")) as scorer:
        scored = scorer.score([reward_arguments("math", text, "7", {}) for text in (FOREVER, "it is 7")])
    assert scored == [
        Score(0.0, {"unchecked": 1.0}, {"score": 0.0}),
        Score(1.0, {"unchecked": 0.0}, {"score": 1.0}),
    ]
