"""Trajectories as their turns make them, and groups as their trajectories do."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.data.stretches import RunLengthArray, fetch_concatenated
from megarl.rewards import Score

ASKED = Turn.of([9, 8], [1, 2], [-0.5, -0.25], [3, 4], "stop")
TOOL = Turn.of([5], [], [], [], "stop")
ANSWERED = Turn.of([6, 6], [7], [-1.0], [4], "length")
TALK = Trajectory((ASKED, TOOL, ANSWERED), "length", Score(1.0))


def test_a_conversation_is_its_turns_end_to_end() -> None:
    assert fetch_concatenated([TALK.token_ids]).tolist() == [9, 8, 1, 2, 5, 6, 6, 7]
    assert TALK.response_ids.tolist() == [1, 2, 5, 6, 6, 7]
    assert fetch_concatenated([(TALK.is_sampled,)]).astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert fetch_concatenated([TALK.log_probs]).tolist() == [0, 0, -0.5, -0.25, 0, 0, 0, -1]
    assert fetch_concatenated([TALK.versions]).tolist() == [3, 4, 4]
    assert (TALK.sampled_tokens, TALK.is_truncated, TALK.reward) == (3, True, 1.0)


def test_a_sampled_token_of_a_long_turn_takes_eight_bytes_also_between_processes() -> None:
    prompt, length = np.arange(1000, dtype=np.int32), 100_000
    turns = [Turn.of(prompt, range(length), [-1.0] * length, [7] * length, "stop") for _ in range(4)]
    assert {each.dtype.itemsize for each in (turns[0].token_ids, turns[0].log_probs)} == {4}
    # The prompt goes along once, whatever the number of samples.
    assert len(pickle.dumps(turns)) < 4 * 8 * length + prompt.nbytes + 2000


def test_short_turns_are_no_more_than_their_bytes_between_processes() -> None:
    prompt = np.arange(20, dtype=np.int32)
    turns = [Turn.of(prompt, [1, 2, 3], [-1.0, -0.0, -np.inf], [7, 7, 8], "stop") for _ in range(8)]
    sent = pickle.dumps(turns, protocol=5)
    assert pickle.loads(sent) == turns
    # Eight turns of 36 bytes and a name or two, and the prompt once: arrays would be 2,700 bytes.
    assert len(sent) < 1100


def test_many_versions_are_said_once() -> None:
    length = 30_000
    turn = Turn.of([9, 8], range(length), [-0.5] * length, [3] * 29_000 + [4] * 1000, "stop")
    assert isinstance(turn.versions, RunLengthArray)
    talk = Trajectory((turn, ANSWERED), "stop")
    assert (talk.length, talk.sampled_tokens) == (30_005, 30_001)
    assert fetch_concatenated([talk.versions]).tolist() == [3] * 29_000 + [4] * 1001
    assert turn == replace(turn, versions=fetch_concatenated([(turn.versions,)]))


def test_turns_are_compared_by_what_is_in_them() -> None:
    assert pickle.loads(pickle.dumps(TALK)) == TALK
    known = Turn.of([5, 9], [40, 2], [-0.7, -0.1], [3, 3], "stop", cached_tokens=1)
    assert pickle.loads(pickle.dumps(known)).cached_tokens == 1
    assert replace(ASKED, versions=np.array([3, 3], dtype=np.int32)) != ASKED
    assert replace(ASKED, finish_reason="length") != ASKED


def test_routed_experts_are_of_all_tokens_and_part_of_a_turn() -> None:
    records = np.arange(5, dtype=np.uint8)[:, None].repeat(3, 1).view("V3")[:, 0]
    routed = replace(ASKED, routed_experts=(records[:2], records[2:4]))
    assert pickle.loads(pickle.dumps(routed)) == routed
    assert routed != ASKED
    assert routed != replace(routed, routed_experts=(records[:2], records[1:3]))
    assert Trajectory((routed,), "stop").routed_experts == routed.routed_experts
    assert Trajectory((routed, ANSWERED), "stop").routed_experts == ()
    with pytest.raises(ValueError, match="a turn of 4 tokens, its prompt included, and 5 records"):
        replace(ASKED, routed_experts=(records,))


def test_pieces_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs and 2 versions"):
        Turn.of([1], [2, 3], [-1.0], [0, 0], "stop")
    with pytest.raises(ValueError, match="without a score"):
        _ = replace(TALK, score=None).reward


def test_a_group_is_compared_as_far_as_it_has_scores() -> None:
    scored, failed = TALK, replace(TALK, score=None, failure="failed")
    group = PromptGroup(Prompt(3, "sums", [9, 8], "7", {}), 12, [scored, failed], baseline=TALK)
    assert group.members == [scored, failed, TALK]
    kept = group.only_scored()
    assert (kept.ordinal, kept.rewards, kept.baseline) == (12, [1.0], TALK)
    assert kept.trajectories[0] is scored
    assert group.with_members(group.trajectories, failed).only_scored().trajectories == []
