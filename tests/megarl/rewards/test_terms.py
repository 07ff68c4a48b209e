"""Several rewards with weights, and configurations that cannot be."""

from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.data import Prompt
from megarl.rewards import RewardFailed, Score, Scorer, reward_arguments
from megarl.rewards.terms import terms_of
from megarl.schema import RewardConfig, RewardTermConfig

LENGTH = f"{Path(__file__).parents[1] / 'reward_functions.py'}:length"


def sample(solution, data_source="any"):
    return reward_arguments(data_source, solution, "7", {})


def terms():
    return {
        "right": RewardTermConfig("exact_match", weight=2.0, data_sources=["sums"]),
        "form": RewardTermConfig("format", weight=0.5, options={"pattern": "[0-9]+"}),
        "size": RewardTermConfig(LENGTH, weight=-0.1),
    }


def test_several_rewards_are_summed_by_their_weights():
    with Scorer(RewardConfig(functions=terms(), workers=2)) as scorer:
        one, two = scorer.score([sample("7", "sums"), sample("seven", "words")])
    assert one.terms == {"right": 2.0, "form": 0.5, "size": -0.1}
    assert one.parts == {**one.terms, "form/unchecked": 0.0, "size/last": ord("7")}
    assert one.value == pytest.approx(2.4)
    assert two.terms == {"form": 0.0, "size": -0.5}
    assert two.value == pytest.approx(-0.5)


@pytest.mark.parametrize(("weights", "solution"), [((1e308,), "ten letter"), ((1.5e308, 1.5e308), "x")])
def test_a_sum_that_is_not_finite_fails_as_a_score_does(weights, solution):
    functions = {f"size_{place}": RewardTermConfig(LENGTH, weight=weight) for place, weight in enumerate(weights)}
    said = "the sum of its terms by their weights must be a finite number, found inf"
    with Scorer(RewardConfig(functions=functions, workers=1)) as scorer, pytest.raises(RewardFailed, match=said):
        scorer.score([sample(solution)])
    with Scorer(RewardConfig(functions=functions, workers=1, on_error="drop")) as scorer:
        (failed,) = scorer.score([sample(solution)])
    assert isinstance(failed, RewardFailed)


def test_a_single_reward_is_the_term_score():
    with Scorer(RewardConfig(function=LENGTH, workers=1)) as scorer:
        assert scorer.score([sample("ab")]) == [Score(2.0, {"last": ord("b")}, {"score": 2.0})]


def test_a_hanging_format_scores_zero_in_its_term_only():
    evil = RewardTermConfig("format", options={"pattern": "(a+)+"})
    config = RewardConfig(functions={"form": evil, "size": RewardTermConfig(LENGTH)}, workers=1, timeout_s=5)
    with Scorer(config) as scorer:
        scored = scorer.score([sample("a" * 60 + "b")])
    (score,) = scored
    assert score.terms == {"form": 0.0, "size": 61.0}
    assert score.parts["form/unchecked"] == 1.0


def test_a_sample_that_no_term_is_for_is_refused():
    only = {"right": RewardTermConfig("exact_match", data_sources=["sums"])}
    with Scorer(RewardConfig(functions=only)) as scorer:
        with pytest.raises(UserError, match=r"no term of reward\.functions is for the data_source 'words'.*right"):
            scorer.score([sample("7", "sums"), sample("7", "words")])
        with pytest.raises(UserError, match="'words'"):
            scorer.check_data_sources(["sums", "words"])
        scorer.check_data_sources(["sums"])


@pytest.mark.parametrize(
    ("given", "is_for"),
    [
        ("aime*", {"aime", "aime2024"}),
        ("aime", {"aime"}),
        ("*", {"aime", "aime2024", "my/aime", "a*e", "a[i]me"}),
        ("a*e", {"a*e"}),
        ("a[i]me", {"a[i]me"}),
    ],
)
def test_a_star_at_the_end_is_all_that_begin_so(given, is_for):
    (term,) = terms_of(RewardConfig(functions={"right": RewardTermConfig("exact_match", data_sources=[given])}))
    sources = ("aime", "aime2024", "my/aime", "a*e", "a[i]me")
    assert {each for each in sources if term.applies_to(each)} == is_for


def test_an_answer_that_was_only_thought_is_none():
    thought, given, open_end = "<think>#### 7</think>It is 8", "<think>8</think>#### 7", "<think>#### 7"
    functions = {
        "right": RewardTermConfig("gsm8k"),
        "form": RewardTermConfig("format", options={"pattern": "<think>.*"}),
    }
    samples = [reward_arguments("any", text, "7", {}) for text in (thought, given, open_end)]
    with Scorer(RewardConfig(functions=functions, workers=1, answer_after="</think>")) as scorer:
        assert [each.terms for each in scorer.score(samples)] == [
            {"right": 0.0, "form": 1.0},
            {"right": 1.0, "form": 1.0},
            {"right": 0.0, "form": 1.0},
        ]
    with Scorer(RewardConfig(function="gsm8k", workers=1)) as scorer:
        assert [each.value for each in scorer.score(samples)] == [1.0, 1.0, 1.0]


def test_a_users_function_reads_the_whole_response():
    with Scorer(RewardConfig(function=LENGTH, workers=1, answer_after="</think>")) as scorer:
        assert scorer.score([sample("<think>")])[0].value == len("<think>")


def question(ground_truth, data_source="sums"):
    return Prompt(0, data_source, [1], ground_truth, {}, where="row 3 (from 0) of sums.parquet")


@pytest.mark.parametrize(
    ("function", "good", "bad", "said"),
    [
        ("gsm8k", "1,000", "a lot", "must be a number, found 'a lot'"),
        ("gsm8k_flexible", "18", "a lot", "must be a number, found 'a lot'"),
        ("numeric_match", "12%", "twelve", "must be a number, found 'twelve'"),
        ("math", r"\$18.90", "", "math-verify cannot parse the ground truth ''"),
        ("math", r"\infty", r"\boxed{", "math-verify cannot parse the ground truth"),
        ("math", r"\frac{1}{2}", "$ $", "math-verify cannot parse the ground truth"),
        ("math", r"\text{Monday}", r"\text{}", "math-verify cannot parse the ground truth"),
        ("math", 5, "%", "math-verify cannot parse the ground truth"),
        ("multiple_choice", "B", "E", "must be one of ABCD, found 'E'"),
        ("json_match", "[7]", "[7", "is no JSON"),
        ("json_schema", {"type": "object"}, {"type": "thing"}, "is no schema"),
        ("tool_call", [{"name": "f", "arguments": {}}], [{"name": "f"}], "must be calls with name and arguments"),
        ("tool_call", '{"name": "f", "arguments": {"a": null}}', {"name": "f", "arguments": {"a": None}}, "holds None"),
        ("json_match", {"a": 1}, {"a": 1, "b": None}, "holds None"),
        ("json_schema", {"type": "object"}, {"$ref": "#/$defs/a"}, "leads to none"),
        ("code", {"inputs": ["1"], "outputs": ["2"]}, {"inputs": ["1"], "outputs": []}, "ground truth of code must be"),
    ],
)
def test_a_bad_ground_truth_is_found_before_the_run(function, good, bad, said):
    with Scorer(RewardConfig(function=function, workers=1)) as scorer:
        scorer.check_questions([question(good), question(good)])
        with pytest.raises(UserError, match=rf"row 3 \(from 0\) of sums.parquet: .*{said}.*correct it, or set"):
            scorer.check_questions([question(good), question(bad)])


def test_a_ground_truth_is_checked_by_its_own_terms_and_not_where_it_is_dropped():
    functions = {"number": RewardTermConfig("gsm8k", data_sources=["sums"]), "text": RewardTermConfig("exact_match")}
    with Scorer(RewardConfig(functions=functions, workers=1)) as scorer:
        scorer.check_questions([question("a lot", "words"), question("7")])
    with Scorer(RewardConfig(function="gsm8k", workers=1, on_error="drop")) as scorer:
        scorer.check_questions([question("a lot")])


def test_the_ground_truths_of_a_large_data_set_are_checked_in_seconds():
    # Parsed one by one, they would run into the time limit of the tests.
    with Scorer(RewardConfig(function="math", workers=1)) as scorer:
        scorer.check_questions(question(rf"\frac{{{number}}}{{\sqrt{{x}}}}") for number in range(100_000))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"function": "math", "functions": {"a": RewardTermConfig("math")}},
            r"reward\.function=math and reward\.func.*",
        ),
        ({"functions": {"a/b": RewardTermConfig("math")}}, "cannot be named 'a/b'"),
        *(
            ({"functions": {name: RewardTermConfig("math")}}, f"cannot be named '{name}'")
            for name in ("score", "overlong", "reward_model")
        ),
        ({"functions": {"a": RewardTermConfig("math", weight=float("inf"))}}, r"functions\.a\.weight=inf must be"),
        ({"functions": {"a": RewardTermConfig("mth")}}, r"reward\.functions\.a\.function='mth' .* mean math"),
        (
            {"functions": {"a": RewardTermConfig("format", options={"patern": "a"})}},
            r"reward\.functions\.a\.options\.patern is no option of reward\.functions\.a\.function=format",
        ),
    ],
)
def test_bad_configurations_are_refused(config, said):
    with pytest.raises(UserError, match=said):
        Scorer(RewardConfig(**config))
