import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.text_match import exact_match, gsm8k


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score"),
    [("601", "601", 1.0), (" 601\n", "601", 1.0), ("601", 601, 1.0), ("106", "601", 0.0), ("601 ok", "601", 0.0)],
)
def test_exact_match(solution, ground_truth, score):
    assert exact_match("any", solution, ground_truth, {}) == score


@pytest.mark.parametrize(
    ("solution", "ground_truth", "strict", "flexible"),
    [
        ("She pays 3 + 4 = 7.\n#### 7", "7", 1.0, 1.0),
        ("#### 7", "8", 0.0, 0.0),
        ("####7", "7", 1.0, 1.0),
        ("the answer is 7", "7", 0.0, 1.0),
        ("the answer is 7.", "7", 0.0, 1.0),
        ("#### 7 and 9 more", "7", 1.0, 0.0),
        ("#### 3\n#### 7", "7", 1.0, 1.0),
        ("#### $1,234.50", "1234.5", 1.0, 1.0),
        ("#### -12", "-12", 1.0, 1.0),
        ("#### -$12", "-12", 1.0, 1.0),
        ("#### \u22125", "-5", 1.0, 1.0),
        ("#### -5", "\u22125", 1.0, 1.0),
        ("#### \u22125", "5", 0.0, 0.0),
        ("#### - 5", "-5", 1.0, 0.0),
        ("#### 7 - 5", "7", 1.0, 0.0),
        ("#### 12", "-12", 0.0, 0.0),
        ("#### 18.00", "18", 1.0, 1.0),
        ("#### 18\n####\n- 18", "18", 1.0, 1.0),
        ("#### 70000", "70,000", 1.0, 1.0),
        ("#### .5", "0.5", 1.0, 1.0),
        ("#### 1.2.3", "1.2", 0.0, 0.0),
        ("no number", "7", 0.0, 0.0),
        ("", "7", 0.0, 0.0),
        ("#### ,", "7", 0.0, 0.0),
        ("#### 7" + "." * 300, "7", 0.0, 0.0),  # the marked number lies before the last 300 characters
    ],
)
def test_gsm8k(solution, ground_truth, strict, flexible):
    assert gsm8k("openai/gsm8k", solution, ground_truth, {}, method="strict") == strict
    assert gsm8k("openai/gsm8k", solution, ground_truth, {}, method="flexible") == flexible


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_gsm8k_scores_equal_integers_however_they_are_grouped(written, truth):
    expected = float(written == truth)
    assert gsm8k("any", f"so #### {written:,}", str(truth)) == expected
    assert gsm8k("any", f"it is {written:,}.", f"{truth:,}", method="flexible") == expected


@given(st.text() | st.text("#$-.,019 ").map("#### {}".format))
def test_gsm8k_takes_any_text(solution):
    for method in ("strict", "flexible"):
        assert gsm8k("any", solution, "7", method=method) in (0.0, 1.0)


def test_gsm8k_refuses_a_ground_truth_that_is_no_number():
    with pytest.raises(ValueError, match="found 'seven'"):
        gsm8k("any", "#### 7", "seven")
