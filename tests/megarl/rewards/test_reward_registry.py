import pytest

from converters.errors import UserError
from megarl.config.schema import RewardConfig
from megarl.rewards import REWARDS, RewardSample, Score, Scorer, load_reward

ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"


def score(spec, solution, ground_truth):
    sample = RewardSample("any", solution, ground_truth, {"index": 1})
    with Scorer(RewardConfig(function=spec, workers=1)) as scorer:
        return scorer.score([sample]).scores


@pytest.mark.parametrize(
    ("name", "solution", "value"),
    [
        ("exact_match", "7", 1.0),
        ("exact_match", "#### 7", 0.0),
        ("gsm8k", "#### 7", 1.0),
        ("gsm8k", "it is 7", 0.0),
        ("gsm8k_flexible", "it is 7", 1.0),
        ("math", r"\boxed{\frac{14}{2}}", 1.0),
    ],
)
def test_built_in_rewards_go_by_name(name, solution, value):
    (result,) = score(name, solution, "7")
    assert result.value == value


def test_the_cases_above_know_every_built_in_reward():
    assert set(REWARDS) == {"exact_match", "gsm8k", "gsm8k_flexible", "math"}


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
        ("gsm8", "did you mean 'gsm8k'"),
        ("zzz", "must be one of exact_match, gsm8k, gsm8k_flexible, math or path/to/file.py:name"),
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
        ("mine.py:scor", r"has no 'scor'; did you mean 'score'\?"),
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
