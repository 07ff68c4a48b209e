import pytest

from converters.errors import UserError
from megarl.rewards import REWARDS, Score, Scorer, load_reward, reward_arguments
from megarl.schema import RewardConfig, RewardTermConfig

ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"


CASES = {
    "exact_match": ({}, "7", "7", 1.0),
    "gsm8k": ({}, "#### 7", "7", 1.0),
    "gsm8k_flexible": ({}, "it is 7", "7", 1.0),
    "numeric_match": ({"absolute": 0.2}, "about 7.1", "7", 1.0),
    "math": ({}, r"\boxed{\frac{14}{2}}", "7", 1.0),
    "math_dapo": ({}, "Answer: $7$", "7", 1.0),
    "multiple_choice": ({"options": "ABCDE"}, "Answer: E", "E", 1.0),
    "json_match": ({}, '{"a": 7}', {"a": 7}, 1.0),
    "json_schema": ({}, "7", {"type": "integer"}, 1.0),
    "tool_call": ({}, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', 1.0),
    "code": ({"partial": True}, "```python\nprint(input())\n```", {"inputs": ["7", "8"], "outputs": ["7", "9"]}, 0.5),
    "format": ({"pattern": "<a>.*</a>"}, "<a>\n7</a>", "7", 1.0),
    "length_penalty": ({"free_tokens": 10, "max_tokens": 20}, "7", "7", -0.5),
    "repetition_penalty": ({"words": 1}, "7 7", "7", -0.5),
}
"""Each built-in reward: options, response, ground truth, score."""


def score(spec, solution, ground_truth):
    sample = reward_arguments("any", solution, ground_truth, {"index": 1})
    with Scorer(RewardConfig(function=spec, workers=1)) as scorer:
        return scorer.score([sample])


def test_built_in_rewards_go_by_name():
    assert set(CASES) == set(REWARDS)
    terms = {
        f"my_{name}": RewardTermConfig(name, options=options, data_sources=[name])
        for name, (options, *_) in CASES.items()
    }
    samples = [reward_arguments(name, case[1], case[2], {}, response_tokens=15) for name, case in CASES.items()]
    with Scorer(RewardConfig(functions=terms, workers=2)) as scorer:
        scores = scorer.score(samples)
    assert {name: score.value for name, score in zip(CASES, scores, strict=True)} == {
        name: case[3] for name, case in CASES.items()
    }


def test_a_sample_that_is_undecided_has_all_parts_of_the_others():
    assert REWARDS["code"].undecided == {"score": 0.0, "passed": 0.0, "timed_out": 0.0, "unchecked": 1.0}
    assert REWARDS["json_schema"].undecided == {"score": 0.0, "valid": 0.0, "unchecked": 1.0}
    assert REWARDS["math"].undecided == {"score": 0.0, "unchecked": 1.0}


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_of_a_file(tmp_path, keyword):
    file = tmp_path / "my.rewards.py"
    file.write_text(
        f"{keyword} length({ARGUMENTS}=None, **more):\n    return {{'score': len(solution_str), 'one': 1}}\n"
    )
    assert score(f"{file}:length", "four", None) == [Score(4.0, {"one": 1.0}, {"score": 4.0})]


def test_a_callable_object_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"class Half:\n    def __call__(self, {ARGUMENTS}):\n        return 0.5\nhalf = Half()\n")
    assert score(f"{file}:half", "", None) == [Score(0.5, {}, {"score": 0.5})]


def test_a_file_may_define_dataclasses(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Weight:\n    value: float = 0.25\n"
        f"def weigh({ARGUMENTS}):\n    return Weight().value\n"
    )
    assert score(f"{file}:weigh", "", None) == [Score(0.25, {}, {"score": 0.25})]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gsm8", "did you mean gsm8k"),
        ("zzz", r"must be one of exact_match, gsm8k, .*, repetition_penalty or path/to/file\.py:name"),
        ("", "must be one of"),
    ],
)
def test_an_unknown_name_is_refused(name, said):
    with pytest.raises(UserError, match=said):
        load_reward(name)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("absent.py:score", r"absent\.py:score: the file does not exist"),
        ("mine.py:scor", r"has no 'scor'; did you mean score\?"),
        ("mine.py:zzz", r"has no 'zzz'; its functions are score, narrow"),
        ("mine.py:weight", "'weight' is a float, not a function"),
        ("mine.py:narrow", "must take data_source, solution_str.*narrow\\(solution_str\\)"),
        ("broken.py:score", "running the file failed with ZeroDivisionError"),
        ("unfinished.py:score", "running the file failed with SyntaxError"),
        ("mine.txt:score", "ends in .py"),
    ],
)
def test_a_bad_file_or_name_is_refused(tmp_path, monkeypatch, spec, said):
    monkeypatch.chdir(tmp_path)
    good = f"weight = 0.5\ndef score({ARGUMENTS}):\n    return 1\ndef narrow(solution_str):\n    return 1\n"
    (tmp_path / "mine.py").write_text(good)
    (tmp_path / "mine.txt").write_text(good)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "unfinished.py").write_text("def score(\n")
    with pytest.raises(UserError, match=said):
        load_reward(spec)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("format", {}, "reward.function=format needs a value for pattern: give it in options"),
        (
            "format",
            {"patern": "."},
            r"options\.patern is no option of .*; did you mean pattern\?.*options are pattern",
        ),
        ("format", {"pattern": "("}, r"options of reward\.function=format: pattern='\(' is no regular expression"),
        ("exact_match", {"case": 1}, "its options are none"),
        ("exact_match", {"solution_str": 1}, "solution_str is no option"),
        ("length_penalty", {"free_tokens": 2, "max_tokens": 2}, "free_tokens=2 must be .* below max_tokens=2"),
        ("length_penalty", {"free_tokens": 2, "max_tokens": "x"}, "not supported between"),
        ("length_penalty", {"free_tokens": 2, "max_tokens": 3, "response_tokens": 1}, "response_tokens is no option"),
        ("numeric_match", {"relative": -1}, "relative=-1 .* at least 0"),
        ("multiple_choice", {"options": "abc"}, "must be capital letters"),
        ("repetition_penalty", {"words": 0}, "words=0 must be at least 1"),
        ("code", {"isolation": "none"}, "isolation='none' must be one of namespaces, limits"),
        ("code", {"memory_mb": 1}, "memory_mb=1, .* at least 64"),
    ],
)
def test_options_that_a_reward_does_not_take_are_refused(spec, options, said):
    with pytest.raises(UserError, match=said):
        load_reward(spec, options, options_key="options")


def test_options_of_a_users_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def near({ARGUMENTS}, *, by=0, **more):\n    return by + more.get('plus', 0)\n")
    assert load_reward(f"{file}:near", {"by": 2, "plus": 1})("", "", "", {}) == 3
    file.write_text(f"def near({ARGUMENTS}, *, by):\n    return by\n")
    with pytest.raises(UserError, match=r"needs a value for by: give it in reward\.functions\.<name>\.options"):
        load_reward(f"{file}:near")
