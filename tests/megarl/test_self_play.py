"""What self-play makes of conversations and replies, and where training on examples ends."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.algorithms import Metrics
from megarl.config.schema import LoopConfig, MegarlConfig, PreferenceConfig, RolloutConfig
from megarl.data import Conversation
from megarl.preferences import pair_batch, with_reference
from megarl.rollout.protocol import Generation
from megarl.spin import Turn, check_lengths, draw_self_play, last_turn, pairs_against
from megarl.supervised import Draw, HeldOut, Training, conversation_batch
from megatron_ext.packing import RaggedBatch
from megatron_ext.step_result import StepResult

ANSWERS = {1: [5, 2], 2: [6, 2], 3: [7, 2]}
"""The replies in the data to prompts of one token; 2 ends them."""
TURNS = [Turn([prompt], reply) for prompt, reply in ANSWERS.items()]


class FakeTrainer:
    """Counts optimizer steps; a log-prob is the token."""

    def __init__(self) -> None:
        self.seen: list[RaggedBatch] = []

    def log_probs(self, batch, *, temperature):
        return SimpleNamespace(log_probs=batch.tokens.float())

    def train_step(self, batch, objective, *, temperature):
        self.seen.append(batch)
        return [StepResult([Metrics({"sft/loss": torch.tensor(float(len(self.seen)))})], 1.0, 1e-3)]


class FakeEngines:
    """Answers what `replies` gives for a prompt."""

    def __init__(self, replies) -> None:
        self.replies = replies
        self.requests: list = []

    def generate(self, requests):
        self.requests += requests
        return [[Generation(self.replies(r.prompt_token_ids[0]), [], [], "stop")] for r in requests]


class Log(list):
    def log(self, step, metrics):
        self.append((step, metrics))


def training(steps: int, pairs_per_step: int = 3, steps_per_generation: int = 2) -> Training:
    config = MegarlConfig(
        output_dir="unused",
        preference=PreferenceConfig(pairs_per_step=pairs_per_step, steps_per_generation=steps_per_generation),
        rollout=RolloutConfig(max_response_tokens=4),
        loop=LoopConfig(max_tokens_per_micro_batch=10),
    )
    start = SimpleNamespace(config=config, model=SimpleNamespace(stop_token_ids=(2,)))
    return Training(start, FakeTrainer(), Log(), steps)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4), st.integers(0, 3))
def test_the_last_reply_has_all_before_it_as_its_prompt(turns, rest):
    mask = [said for asked, answered in turns for said in [False] * asked + [True] * answered]
    token_ids = list(range(len(mask) + rest))
    turn = last_turn(Conversation(token_ids, mask + [False] * rest))
    assert turn.prompt + turn.reply == token_ids[: len(mask)]
    assert len(turn.reply) == turns[-1][1]


def test_a_pair_is_the_reply_in_the_data_against_another():
    (pair,) = pairs_against(TURNS[:2], [[5, 2], [9, 9, 2]])
    assert pair.chosen == Conversation([2, 6, 2], [False, True, True])
    assert pair.rejected == Conversation([2, 9, 9, 2], [False, True, True, True])


def test_each_iteration_answers_with_the_weights_it_begins_with():
    run, engines, versions = training(steps=5), FakeEngines(lambda prompt: [9, 2]), []

    def refit(version):
        versions.append((version, len(run.trainer.seen)))
        return {"refit/bytes": 1.0}

    run.learn(draw_self_play(run, engines, refit, TURNS), lambda: None, None)
    # Two optimizer steps each, of three pairs; the third iteration is cut off by the number of steps.
    assert versions == [(0, 0), (2, 2), (4, 4)]
    assert [len(batch) for batch in run.trainer.seen] == [6] * 5
    assert [step for step, metrics in run.tracker if "spin/equal" in metrics and "refit/bytes" in metrics] == [1, 3, 5]
    assert all(request.sampling.samples == 1 and request.sampling.max_tokens == 4 for request in engines.requests)
    assert len({request.sampling.seed for request in engines.requests}) == 18
    for batch in run.trainer.seen:
        assert torch.equal(batch.fields["reference_log_probs"], batch.tokens.float())


def test_what_is_the_same_is_left_out_and_a_policy_like_its_data_ends_the_run(capsys):
    run, known = training(steps=50, pairs_per_step=1, steps_per_generation=3), []
    engines = FakeEngines(lambda prompt: ANSWERS[prompt] if prompt in known else [9, 2])

    def refit(version):
        # It learns one reply per iteration.
        known.append(len(known))
        return {}

    run.learn(draw_self_play(run, engines, refit, TURNS), lambda: None, None)
    equal = [round(metrics["spin/equal"], 6) for _, metrics in run.tracker if "spin/equal" in metrics]
    assert equal == [0, 0.333333, 0.666667]
    # Three, two, one pairs, and as many optimizer steps.
    assert [len(batch) // 2 for batch in run.trainer.seen] == [1] * 6
    assert capsys.readouterr().out == (
        "after step 6 all 3 replies of the policy are those in the data: training ends\n"
    )


def test_a_pair_that_has_no_place_is_refused_before_anything_starts():
    config = training(1).start.config
    check_lengths([Turn([1, 1], [2, 2])], config)
    with pytest.raises(UserError, match=r"has 11 tokens, more than loop.max_tokens_per_micro_batch=10: raise"):
        check_lengths([Turn([1], [2]), Turn([1, 1], [2, 2, 2])], config)


def test_training_ends_with_its_steps_or_when_it_is_enough():
    def draws():
        while True:
            yield Draw(conversation_batch([Conversation([1, 2], [False, True])], "token_mean"))

    run, measured = training(steps=5), []

    def measure():
        measured.append(len(run.trainer.seen))
        return {"sft/exact_match": 0.5}

    run.learn(draws(), lambda: None, HeldOut(measure, every=2))
    assert len(run.trainer.seen) == 5
    assert measured == [2, 4, 5]
    run = training(steps=5)
    run.learn(draws(), lambda: None, HeldOut(measure, every=2, is_enough=lambda metrics: "sft/exact_match" in metrics))
    assert len(run.trainer.seen) == 2


def test_an_impossible_reply_is_named():
    batch = pair_batch(pairs_against(TURNS, [[9, 2]] * 3))
    log_probs = torch.zeros(len(batch.tokens))
    log_probs[7] = float("-inf")
    with pytest.raises(UserError, match=r"token 1 of the chosen reply of pair 1 \(from 0\) of the batch is -inf"):
        with_reference(batch, log_probs)


def test_pairs_weigh_the_same_whatever_their_lengths():
    pairs = pairs_against(TURNS, [[9] * length for length in (1, 2, 3)])
    batch = pair_batch(pairs)
    assert batch.unit == 2
    weights = batch.fields["weights"].split(batch.lengths.tolist())
    for weight, conversation in zip(weights, [reply for pair in pairs for reply in pair], strict=True):
        assert weight.tolist() == pytest.approx([said / 6 for said in conversation.mask])
