import pytest

from megarl.rewards.math_dapo import math_dapo

# Each with what compute_score of verl's utils/reward_score/math_dapo.py says of it (commit b178a3cd).
CASES = [
    ("\\boxed{35}\nAnswer: 34", "34", True),
    ("we find that the sum is $34$. Let me double check", "34", False),
    ("Thus the result is \\boxed{34}.", "34", False),
    ("<think> maybe \\boxed{34} but wait", "34", False),
    ("Answer: 34\nAnswer: 35", "34", False),
    ("Answer: 34" + " " * 290, "34", True),
    ("Answer: 34" + "." * 295, "34", False),
    ("ANSWER :\n 34", "34", True),
    ("**Answer:** 34", "34", False),
    ("Answer: x = 34 square feet", "34", True),
    ("Answer: the 34", "34", False),
    ("Answer: an \\text{34}", "34", True),
    ("Answer: so $34$ it is", "34", True),
    ("Answer: 34.", "34", False),
    ("Answer: $34.$", "34", True),
    ("Answer: \\boxed{34}", "34", True),
    ("Answer: 1,234", "1234", True),
    ("Answer: 1,2,3x", "123x", False),
    ("Answer: 34", "34.0", False),
    ("Answer: 0.5", "\\frac{1}{2}", False),
    ("Answer: \\frac12", "\\frac{1}{2}", True),
    ("Answer: \\sqrt2", "\\sqrt{2}", True),
    ("Answer: 90^\\circ", "90", True),
    ("Answer: {,}\\overline{AB}\\dots", "AB", True),
    ("nothing", "[INVALID]", True),
    ("Answer:", "", False),
    ("Answer: 34", 34, True),
]


@pytest.mark.parametrize(("solution", "ground_truth", "is_right"), CASES)
def test_right_and_wrong_are_those_of_verl(solution: str, ground_truth: object, is_right: bool) -> None:
    assert math_dapo("math_dapo", solution, ground_truth, {}) == float(is_right)
