"""pass@k, majority@k and best@k against every choice of k samples."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.time_limit import cpu_time_limit
from megarl.diagnostics.answers import answer_of
from megarl.diagnostics.pass_at_k import (
    Answers,
    accuracy_by_source,
    best_at,
    by_source,
    majority_at,
    pass_at,
    powers_of_two,
)

ANSWER = st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 0.75, 1.0, -1.0]))
RESPONSES = st.lists(ANSWER, min_size=1, max_size=7)


def answers(responses, source="s") -> Answers:
    return Answers(source, [text for text, _ in responses], [reward for _, reward in responses])


def vote(responses) -> float:
    """Expected reward of the winner, as one would count by hand."""
    by_text: dict[str, list[float]] = {}
    for text, reward in responses:
        by_text.setdefault(text, []).append(reward)
    most = max(len(found) for found in by_text.values())
    winners = [sum(found) / len(found) for found in by_text.values() if len(found) == most]
    return sum(winners) / len(winners)


@given(RESPONSES, st.integers(1, 7))
def test_pass_and_best_are_means_over_all_choices(responses, k):
    k = min(k, len(responses))
    choices = list(combinations([reward for _, reward in responses], k))
    right = [any(reward > 0.5 for reward in choice) for choice in choices]
    assert pass_at(answers(responses), k) == pytest.approx(np.mean(right))
    assert best_at(answers(responses), k) == pytest.approx(np.mean([max(choice) for choice in choices]))


@given(RESPONSES)
def test_the_majority_of_all_is_counted_as_by_hand(responses):
    assert majority_at(answers(responses), len(responses)) == pytest.approx(vote(responses))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_majority_of_k_is_unbiased(k):
    responses = [("a", 1.0), ("a", 1.0), ("b", 0.25), ("c", 0.0), ("b", 0.25)]
    found = [majority_at(answers(order), k) for order in permutations(responses)]
    assert np.mean(found) == pytest.approx(np.mean([vote(choice) for choice in combinations(responses, k)]))


def test_a_tie_is_shared_and_blocks_follow_each_other():
    split = [("a", 1.0), ("b", 0.0), ("a", 1.0), ("a", 1.0), ("c", 0.0)]
    assert majority_at(answers(split), 2) == 0.75
    assert majority_at(answers(split), 5) == 1.0
    # An answer that is the same and scored differently counts with its mean.
    assert majority_at(answers([("a", 1.0), ("a", 0.0), ("b", 9.0)]), 3) == 0.5


def test_thousands_of_samples_are_no_matter():
    many = Answers("s", ["a"] * 4096, [1.0] + [0.0] * 4095)
    assert pass_at(many, 1024) == pytest.approx(0.25)
    assert best_at(many, 1024) == pytest.approx(0.25)


def test_metrics_are_overall_and_of_each_source():
    easy, hard = answers([("a", 1.0), ("b", 0.0)], "easy"), answers([("c", 0.0), ("d", 0.0)], "hard")
    found = by_source([easy, hard], samples=2)
    assert found == {
        "accuracy": 0.25,
        "mean_at_2": 0.25,
        "pass_at_1": 0.25,
        "majority_at_1": 0.25,
        "best_at_1": 0.25,
        "pass_at_2": 0.5,
        "majority_at_2": 0.25,
        "best_at_2": 0.5,
        **{f"source/easy/{name}_at_{k}": 0.5 for name in ("pass", "majority", "best") for k in (1, 2)},
        **{f"source/hard/{name}_at_{k}": 0.0 for name in ("pass", "majority", "best") for k in (1, 2)},
        **{f"source/easy/{name}": 0.5 for name in ("accuracy", "mean_at_2")},
        **{f"source/hard/{name}": 0.0 for name in ("accuracy", "mean_at_2")},
        "source/easy/pass_at_2": 1.0,
        "source/easy/best_at_2": 1.0,
    }
    assert by_source([easy], samples=2).keys() == {name for name in found if not name.startswith("source/")}


def test_a_prompt_that_lost_responses_counts_where_it_has_enough():
    whole, part = answers([("a", 0.0)] * 4), answers([("a", 1.0), ("b", 1.0)])
    found = by_source([whole, part], samples=4)
    assert (found["mean_at_4"], found["pass_at_2"], found["pass_at_4"]) == (0.5, 0.5, 0.0)
    assert found["accuracy"] == accuracy_by_source([whole, part])["accuracy"] == 0.5
    assert "pass_at_4" not in by_source([part], samples=4)


def test_k_are_the_powers_of_two_and_all():
    assert [powers_of_two(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  The  Answer\nis 4. ", "theansweris4"),
        (r"so \boxed{1} or \boxed{\frac{1}{2}} #### 3", r"\frac{1}{2}"),
        ("<answer> A </answer> <answer>B.</answer> then #### 7", "b"),
        ("1 #### 2\n#### $5$ \nthe end", "5"),
        (r"\boxed{1 #### 6", "6"),
        ("</answer> <answer>", "</answer><answer>"),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}"),
        (r"\boxed{\tfrac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1,234,567}", "1234567"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1\,234}", "1234"),
        (r"\boxed{1,\!234\!,\!567\!890}", "1234567890"),
        (r"\boxed{x = 5}", "x=5"),
        (r"\boxed{(1, 234)}", "(1,234)"),
        (r"\boxed{1,2}", "1,2"),
        ("", ""),
    ],
)
def test_an_answer_is_the_last_of_the_surest_kind(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize("text", ["{" * 300_000, r"\boxed{" * 50_000, "<answer>" * 50_000, "#" * 400_000])
def test_a_long_text_takes_no_longer_than_its_length(text):
    # The square of its length would be minutes.
    with cpu_time_limit(20):
        assert answer_of(text) == ("" if text.startswith("#") else text)
