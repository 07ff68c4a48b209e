"""Trajectories to scored trajectories: texts, failures, groups, the penalty of long ones, and the metrics of it all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.algorithms.advantages.group_rewards import grpo
from megarl.algorithms.advantages.groups import Groups
from megarl.config.compose import compose
from megarl.config.folder import recipes_folder
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.data.stretches import fetch_concatenated
from megarl.diagnostics import reward_metrics
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import REWARDS, RewardFailed, Score, Scorer
from megarl.schema import RewardConfig
from megarl.stages import evaluate
from megarl.stages.reward import begin_scoring, overlong_penalty, with_model_scores, with_outcomes

TOKENIZER = make_tokenizer()
# An async one: no process has to start.
NUMBER = f"{Path(__file__).parents[1] / 'reward_functions.py'}:as_number_later"


def response(text):
    tokens = [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id]
    return Trajectory((Turn.of([1], tokens, [0] * len(tokens), [0] * len(tokens), "stop"),), "stop")


def group(*texts, ordinal=0, ground_truth="truth", data_source="any"):
    prompt = Prompt(ordinal, data_source, [1], ground_truth, {"index": ordinal})
    return PromptGroup(prompt, ordinal, [response(text) for text in texts])


def score_all(groups, **config):
    with Scorer(RewardConfig(function=NUMBER, workers=2, **config)) as scorer:
        return evaluate.score_all(groups, scorer, TOKENIZER)


def score_with_limit(group, max_response_tokens, **config):
    with Scorer(RewardConfig(function=NUMBER, workers=2, **config)) as scorer:
        pending = scorer.begin()
        begin_scoring(pending, group, TOKENIZER)
        return with_outcomes(group, pending.finish(), scorer.config, max_response_tokens)


def test_every_response_gets_the_score_of_its_text_whatever_comes_first():
    scored = score_all([group("2", ordinal=5), group("1", "3", ordinal=4)])
    assert [each.ordinal for each in scored] == [4, 5]
    assert [each.score for group in scored for each in group.trajectories] == [
        Score(float(n), {"half": n / 2}, {"score": float(n)}) for n in (1, 3, 2)
    ]
    assert scored[1].trajectories[0].turns == response("2").turns


def test_the_baseline_is_scored_with_its_group():
    (scored,) = score_all([group("1", "2").with_members([response("1")], response("3"))])
    assert (scored.rewards, scored.baseline.reward) == ([1.0], 3.0)
    (failed,) = score_all([group().with_members([response("1")], response("x"))], on_error="drop")
    assert failed.baseline.failure == "failed"
    assert failed.only_scored().trajectories == []
    assert reward_metrics([scored, failed])["reward/dropped"] == 1


def test_what_fails_has_no_score_or_stops():
    responses = group("1", "x", "2")
    (scored,) = score_all([responses], on_error="drop")
    assert [(each.score and each.reward, each.failure) for each in scored.trajectories] == [
        (1.0, None),
        (None, "failed"),
        (2.0, None),
    ]
    assert scored.only_scored().rewards == [1.0, 2.0]
    with pytest.raises(RewardFailed, match="could not convert"):
        score_all([responses])
    with pytest.raises(
        UserError, match=r"failed for all 1 responses \(0 took too long, the processes of 0 were killed\)"
    ):
        score_all([group("x")], on_error="drop")


def test_the_text_of_a_conversation_is_all_after_the_first_prompt():
    ids = [TOKENIZER(digit).input_ids for digit in "12"]
    turns = [
        Turn.of(prompt, own, [0], [0], "stop") for prompt, own in zip([[1], TOKENIZER("3").input_ids], ids, strict=True)
    ]
    talk = PromptGroup(group().prompt, 0, [Trajectory(turns, "stop")])
    scored = score_with_limit(talk, 2, overlong_buffer_tokens=1)
    # One of the two sampled tokens is in the buffer of one.
    assert scored.rewards == [132.0 - 1.0]


@pytest.mark.parametrize(
    ("how", "rewards", "dropped"),
    [({}, [1.0, None, 0.0, 2.0], 1), ({"on_timeout": "drop"}, [1.0, None, None, 2.0], 2)],
)
def test_what_takes_too_long_stays_with_a_zero_unless_it_is_dropped_and_is_counted(tmp_path, how, rewards, dropped):
    file = tmp_path / "mine.py"
    file.write_text(
        "import time\ndef act(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(99 if solution_str == 'slow' else 0)\n    return float(solution_str)\n"
    )
    config = RewardConfig(function=f"{file}:act", workers=2, timeout_s=2.0, on_error="drop", **how)
    with Scorer(config) as scorer:
        (scored,) = evaluate.score_all([group("1", "x", "slow", "2")], scorer, TOKENIZER)
    assert [each.score and each.reward for each in scored.trajectories] == rewards
    assert [each.failure for each in scored.trajectories] == [None, "failed", "timed_out", None]
    metrics = reward_metrics([scored])
    assert (metrics["reward/dropped"], metrics["reward/timed_out"]) == (dropped, 1)
    assert metrics["reward/timed_out_fraction"] == 0.25


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


DAPO = sorted({file.stem for file in recipes_folder().glob("*dapo*.yaml")})


@pytest.mark.parametrize("name", DAPO)
def test_recipes_of_dapo_penalise_long_responses_as_the_paper_does(name):
    """Its right and wrong answers are worth 1 and -1, and its penalty is 1 (arXiv:2503.14476, equations 7 and 13)."""
    config = compose(name, ["model.path=x", "data.train_files=[x]", "data.eval_files=[x]", "output_dir=x"])
    longest, buffer = config.rollout.max_response_tokens, config.reward.overlong_buffer_tokens
    assert REWARDS[config.reward.function].nothing["score"] == 0.0
    # Right, and length: two are within the buffer, one of them at its end.
    responses = [(1, 1), (1, 1), (1, longest), (1, longest - buffer // 2), (1, 1), (0, 1), (0, 1), (0, longest)]
    made = group(*("1" for _ in responses))
    members = [
        Trajectory((Turn.of([1], [1] * tokens, [0] * tokens, [0] * tokens, "stop"),), "stop") for _, tokens in responses
    ]
    outcomes = {(0, place): Score(float(right)) for place, (right, _) in enumerate(responses)}
    ours = with_outcomes(made.with_members(members), outcomes, config.reward, longest).rewards
    paper = [2.0 * right - 1 + overlong_penalty(tokens, longest, buffer, 1.0) for right, tokens in responses]
    assert (config.algorithm.advantage, config.algorithm.advantage_options) == ("grpo", {})
    prompts = Groups.of(torch.zeros(len(responses), dtype=torch.long))
    advantages = [grpo(torch.tensor(rewards, dtype=torch.float64), prompts) for rewards in (ours, paper)]
    torch.testing.assert_close(*advantages, rtol=1e-5, atol=0)


def test_long_responses_are_penalised_in_training_only():
    config = {"overlong_buffer_tokens": 4, "overlong_penalty": 0.5}
    responses = group("1", "1.0", "1.00000")  # 2, 4 and 8 tokens
    shaped = score_with_limit(responses, 8, **config)
    assert shaped.rewards == [1.0, 1.0, 0.5]
    long = shaped.trajectories[2].score
    assert long == Score(0.5, {"half": 0.5, "overlong": -0.5}, {"score": 1.0, "overlong": -0.5})
    (plain,) = score_all([responses], **config)
    assert plain.rewards == [1.0, 1.0, 1.0]


def test_a_response_that_took_too_long_counts_in_the_means_of_parts():
    (one,) = group("").trajectories
    quick = [replace(one, score=Score(1.0, {"passed": value})) for value in (1.0, 0.5)]
    slow = replace(one, score=Score(0.0), failure="timed_out")
    assert reward_metrics([group().with_members([*quick, slow])])["reward/part/passed"] == 0.5


def test_metrics_of_rewards():
    def scored(source, value):
        (one,) = group("", data_source=source).trajectories
        parts = {"half": value / 2, "code/unchecked": float(source == "b")}
        return group(data_source=source).with_members([replace(one, score=Score(value, parts))])

    groups = [scored("a", 1.0), scored("b", 3.0), scored("any", 5.0)]
    unscored = [replace(response(""), failure=failure) for failure in ("failed", "timed_out", "lost")]
    groups[0] = groups[0].with_members([*groups[0].trajectories, *unscored])
    assert reward_metrics(groups) == pytest.approx(
        {
            "reward/mean": 3.0,
            "reward/std": (8 / 3) ** 0.5,
            "reward/max": 5.0,
            "reward/min": 1.0,
            "reward/dropped": 3.0,
            "reward/timed_out": 1.0,
            "reward/timed_out_fraction": 1 / 6,
            "reward/undecided_fraction": 1 / 3,
            "reward/lost": 1.0,
            "reward/source/a/mean": 1.0,
            "reward/source/b/mean": 3.0,
            "reward/source/any/mean": 5.0,
            "reward/part/half": 1.5,
            "reward/part/code/unchecked": 1 / 3,
        }
    )


class RewardModel:
    """Scores a sequence by the last token that is no end."""

    def scores(self, batch):
        return torch.tensor([TEN_TIMES[int(ids[-2])] for ids in (fetch_concatenated([each]) for each in batch.tokens)])


TEN_TIMES = {TOKENIZER(str(digit)).input_ids[-1]: 10.0 * digit for digit in range(1, 6)}


def test_the_reward_model_adds_to_what_has_a_score_and_to_its_own_response():
    def scored(each):
        return replace(each, score=Score(0.5, {}, {"score": 0.5}))

    first, second, third = (group(*texts, ordinal=n) for n, texts in enumerate(("123", "4", "5")))
    one, failed, three = first.trajectories
    groups = [
        first.with_members([scored(one), failed, scored(three)]),
        second.with_members([scored(second.trajectories[0])], scored(response("2"))),
        third.with_members([scored(third.trajectories[0])], response("1")),
    ]
    found = with_model_scores(groups, RewardModel(), 0.1)
    rewards = [[each.score and each.score.value for each in found_group.members] for found_group in found]
    assert rewards == [[1.5, None, 3.5], [4.5, 2.5], [5.5, None]]
    assert found[1].baseline.score.terms == {"score": 0.5, "reward_model": 2.0}
    without = [groups[0].with_members([failed])]
    assert with_model_scores(without, None, 0.1) == without


def test_a_score_of_the_reward_model_that_is_no_number_is_named_by_its_prompt():
    class Broken(RewardModel):
        def scores(self, batch):
            return super().scores(batch).masked_fill(super().scores(batch) == 40, torch.nan)

    groups = [group("12"[n], ordinal=n) for n in range(2)] + [group("3", "4", ordinal=7)]
    groups = [each.with_members([replace(one, score=Score(0.0)) for one in each.trajectories]) for each in groups]
    groups[0] = groups[0].with_members([replace(groups[0].trajectories[0], score=None)])
    with pytest.raises(UserError, match=r"the reward model's score of a response to prompt 7 \(any\)"):
        with_model_scores(groups, Broken(), 1.0)
