"""Trajectories to scored trajectories: texts, failures, groups, the penalty of long ones, and the metrics of it all."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.data import Prompt, Trajectory, Turn
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import RewardFailed, Score, Scorer
from megarl.schema import RewardConfig, RewardTermConfig
from megarl.stages.reward import Scoring, overlong_penalty, reward_metrics

TOKENIZER = make_tokenizer()
# An async one: no process has to start.
NUMBER = f"{Path(__file__).parents[1] / 'reward_functions.py'}:as_number_later"


def trajectory(text, group=0, ground_truth="truth", data_source="any", score=None):
    tokens = [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id]
    prompt = Prompt(group, data_source, [1], ground_truth, {"index": group})
    turn = Turn.of([1], tokens, [0] * len(tokens), [0] * len(tokens), "stop")
    return Trajectory(prompt, group, (turn,), score)


def score(trajectories, *, max_response_tokens=None, **config):
    with Scorer(RewardConfig(function=NUMBER, workers=2, **config)) as scorer:
        scoring = Scoring(scorer, TOKENIZER, max_response_tokens=max_response_tokens)
        scoring.add(trajectories)
        return scoring.finish().trajectories


def test_every_response_gets_the_score_of_its_text():
    scored = score([trajectory("1"), trajectory("2", 1)])
    assert [t.score for t in scored] == [Score(float(n), {"half": n / 2}, {"score": float(n)}) for n in (1, 2)]
    assert [t.token_ids.tolist() for t in scored] == [
        [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id] for text in "12"
    ]


def test_what_fails_is_left_out_or_stops():
    responses = [trajectory("1"), trajectory("x"), trajectory("2")]
    assert [t.reward for t in score(responses, on_error="drop")] == [1.0, 2.0]
    with pytest.raises(RewardFailed, match="could not convert"):
        score(responses)
    with pytest.raises(UserError, match=r"failed for all 1 responses \(0 took too long\)"):
        score([trajectory("x")], on_error="drop")


def test_responses_are_scored_as_they_come_and_leave_by_group():
    config = RewardConfig(functions={"right": RewardTermConfig("exact_match", weight=2.0)}, workers=2)
    with Scorer(config) as scorer:
        scoring = Scoring(scorer, TOKENIZER)
        scoring.add([trajectory("b", 1, "b"), trajectory("a", 1, "b")])
        scoring.add([])
        scoring.add([trajectory("", 2, "")])
        scoring.add([trajectory("c", 0, "c")])
        rewarded = scoring.finish()
    assert [(t.group, t.reward) for t in rewarded.trajectories] == [(0, 2.0), (1, 2.0), (1, 0.0), (2, 2.0)]
    assert (rewarded.failed, rewarded.timed_out) == (0, 0)


@pytest.mark.parametrize(("how", "rewards"), [({}, [1.0, 0.0, 2.0]), ({"on_timeout": "drop"}, [1.0, 2.0])])
def test_what_takes_too_long_stays_with_a_zero_unless_it_is_dropped_and_is_counted(tmp_path, how, rewards):
    file = tmp_path / "mine.py"
    file.write_text(
        "import time\ndef act(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(99 if solution_str == 'slow' else 0)\n    return float(solution_str)\n"
    )
    config = RewardConfig(function=f"{file}:act", workers=2, timeout_s=2.0, on_error="drop", **how)
    with Scorer(config) as scorer:
        scoring = Scoring(scorer, TOKENIZER)
        scoring.add([trajectory(text) for text in ("1", "x", "slow", "2")])
        rewarded = scoring.finish()
    assert [t.reward for t in rewarded.trajectories] == rewards
    assert (rewarded.failed, rewarded.timed_out) == (1, 1)


# By hand, from the formula of verl 0.10.0.dev's DAPO reward manager: longest response 20, buffer 8, factor 1.
OVERLONG_BY_HAND = {1: 0.0, 12: 0.0, 13: -0.125, 16: -0.5, 20: -1.0, 24: -1.5}


@pytest.mark.parametrize(("tokens", "penalty"), OVERLONG_BY_HAND.items())
def test_overlong_penalty_by_hand(tokens, penalty):
    assert overlong_penalty(tokens, 20, 8, 1.0) == penalty
    assert overlong_penalty(tokens, 20, 8, 0.5) == penalty / 2


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100), st.floats(0, 10))
def test_overlong_penalty_is_between_nothing_and_its_factor(buffer, more, tokens, factor):
    longest = buffer + more
    penalty = overlong_penalty(min(tokens, longest), longest, buffer, factor)
    assert -factor <= penalty <= 0
    assert overlong_penalty(longest, longest, buffer, factor) == -factor


def test_long_responses_are_penalised_in_training_only():
    config = {"overlong_buffer_tokens": 4, "overlong_penalty": 0.5}
    responses = [trajectory("1"), trajectory("1.0"), trajectory("1.00000")]  # 2, 4 and 8 tokens
    shaped = score(responses, max_response_tokens=8, **config)
    assert [t.reward for t in shaped] == [1.0, 1.0, 0.5]
    assert shaped[2].scored == Score(0.5, {"half": 0.5, "overlong": -0.5}, {"score": 1.0, "overlong": -0.5})
    assert [t.reward for t in score(responses, **config)] == [1.0, 1.0, 1.0]


def test_metrics_of_rewards():
    scored = [
        trajectory("", data_source=source, score=Score(value, {"half": value / 2}))
        for source, value in (("a", 1.0), ("b", 3.0), ("any", 5.0))
    ]
    assert reward_metrics(scored, dropped=2, timed_out=1) == pytest.approx(
        {
            "reward/mean": 3.0,
            "reward/std": (8 / 3) ** 0.5,
            "reward/max": 5.0,
            "reward/min": 1.0,
            "reward/dropped": 2.0,
            "reward/timed_out": 1.0,
            "reward/source/a/mean": 1.0,
            "reward/source/b/mean": 3.0,
            "reward/source/any/mean": 5.0,
            "reward/part/half": 1.5,
        }
    )
