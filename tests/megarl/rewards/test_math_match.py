import pytest

from megarl.rewards import Score, Scorer, reward_arguments
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


def test_an_endless_comparison_is_ended_and_scored_zero():
    # Shorter than the built-in limit, and of the same effect.
    config = RewardConfig(function="math", workers=1, timeout_s=2.0, on_timeout="stop")
    with Scorer(config) as scorer:
        scored = scorer.score([reward_arguments("math", text, "7", {}) for text in (FOREVER, "it is 7")])
    assert scored == [
        Score(0.0, {"unchecked": 1.0}, {"score": 0.0}),
        Score(1.0, {"unchecked": 0.0}, {"score": 1.0}),
    ]
