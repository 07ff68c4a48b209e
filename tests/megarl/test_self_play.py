"""Self-play: what it makes of conversations and replies, and where training on examples ends."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.architectures import read_architecture
from converters.errors import UserError
from megarl.algorithms import Metrics
from megarl.cluster.trainer.batch import sequences_of
from megarl.config.folder import known_model
from megarl.data import Conversation, Turn
from megarl.run.batches import StepBatch
from megarl.run.checkpoints import Checkpoints, latest_checkpoint
from megarl.run.opening import RunSetup
from megarl.run.preferences import pair_batch, with_reference
from megarl.run.supervised import Measurement, Position, Training
from megarl.run.throughput import Throughput
from megarl.run.timeline import Timeline
from megarl.schema import CheckpointConfig, LoopConfig, MegarlConfig, PreferenceConfig, RolloutConfig
from megarl.spin import Exchange, check_lengths, draw_iteration, last_exchange, pairs_against
from megarl.stages.conversations import conversation_batch
from megatron_ext.model.multi_token_prediction import predictable, with_mtp_tokens
from megatron_ext.objective import StepResult
from megatron_ext.packing.packing import RaggedBatch, drafted, pack

ANSWERS = {1: [5, 2], 2: [6, 2], 3: [7, 2]}
"""The replies in the data to prompts of one token; 2 ends them."""
EXCHANGES = [Exchange([prompt], reply) for prompt, reply in ANSWERS.items()]


class FakeTrainer:
    """Counts optimizer steps; a log-prob is the token."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seen: list[RaggedBatch] = []

    def log_probs(self, batch, *, temperature):
        return sequences_of(batch.load().tokens.float(), batch.lengths)

    def train_step(self, batch, objective, *, temperature):
        self.seen.append(batch.load())
        self.steps += 1
        return StepResult([Metrics({"sft/loss": torch.tensor(float(self.steps))})], 1.0, 1e-3)

    def take_flops(self):
        return 0.0

    def begin_save(self, folder, *, in_background):
        (folder / "weights").write_text(str(self.steps))

    def finish_save(self):
        return 0.0


class FakeEngines:
    """Answers what `replies` gives for a prompt."""

    def __init__(self, replies) -> None:
        self.replies = replies
        self.requests: list = []

    def generate(self, requests):
        self.requests += requests
        replies = [self.replies(request.prompt_token_ids[0]) for request in requests]
        return [[Turn.of([], reply, [0] * len(reply), [0] * len(reply), "stop")] for reply in replies]


class Log(list):
    def log(self, step, metrics):
        self.append((step, metrics))


@pytest.fixture
def training(tmp_path):
    """Makes a run of so many steps, which continues where an earlier one stopped."""
    return partial(make_training, tmp_path)


def make_training(folder, steps: int, pairs_per_step: int = 3, steps_per_generation: int = 2) -> Training:
    config = MegarlConfig(
        output_dir=str(folder),
        checkpoint=CheckpointConfig(every=1),
        preference=PreferenceConfig(
            steps=steps, pairs_per_step=pairs_per_step, steps_per_generation=steps_per_generation
        ),
        rollout=RolloutConfig(max_response_tokens=4),
        loop=LoopConfig(max_tokens_per_micro_batch=10),
    )
    model = SimpleNamespace(stop_token_ids=(2,), architecture=read_architecture(known_model("qwen3_1_7b")))
    setup = RunSetup(config, "spin", model, None, latest_checkpoint(config, "spin"))
    trainer, position = FakeTrainer(setup.step), Position(setup.step, has_converged=False)
    throughput, timeline = Throughput(trainer, (), 0, None), Timeline(None, folder, [], None, None)
    checkpoints = Checkpoints(config, "spin", {"": trainer})
    return Training(setup, SimpleNamespace(), trainer, Log(), position, throughput, timeline, checkpoints)


def self_play(run, engines, refit):
    return run.setup.batches(
        run.setup.sampler(len(EXCHANGES), ""), partial(draw_iteration, run, engines, refit, EXCHANGES)
    )


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4), st.integers(0, 3))
def test_the_last_reply_has_all_before_it_as_its_prompt(exchanges, rest):
    mask = [said for asked, answered in exchanges for said in [False] * asked + [True] * answered]
    token_ids = list(range(len(mask) + rest))
    exchange = last_exchange(Conversation(token_ids, mask + [False] * rest))
    assert exchange.prompt + exchange.reply == token_ids[: len(mask)]
    assert len(exchange.reply) == exchanges[-1][1]


def test_a_pair_is_the_reply_in_the_data_against_another():
    (pair,) = pairs_against(EXCHANGES[:2], [[5, 2], [9, 9, 2]])
    assert pair.chosen == Conversation([2, 6, 2], [False, True, True])
    assert pair.rejected == Conversation([2, 9, 9, 2], [False, True, True, True])


def test_each_iteration_answers_with_the_weights_it_begins_with(training):
    run, engines, versions = training(steps=5), FakeEngines(lambda prompt: [9, 2]), []

    def refit(version):
        versions.append((version, len(run.trainer.seen)))
        return {"refit/bytes": 1.0}

    run.learn(self_play(run, engines, refit), lambda: None, None)
    # Two optimizer steps each, of three pairs; the third iteration is cut off by the number of steps.
    assert versions == [(1, 0), (3, 2), (5, 4)]
    assert [len(batch) for batch in run.trainer.seen] == [6] * 5
    assert [step for step, metrics in run.tracker if "spin/equal" in metrics and "refit/bytes" in metrics] == [1, 3, 5]
    assert all(request.sampling.samples == 1 and request.sampling.max_tokens == 4 for request in engines.requests)
    assert len({request.sampling.seed for request in engines.requests}) == 18
    for batch in run.trainer.seen:
        assert torch.equal(batch.fields["reference_log_probs"], batch.tokens.float())


def test_what_is_the_same_is_left_out_and_a_policy_like_its_data_ends_the_run(training, capsys):
    run, known = training(steps=50, pairs_per_step=1, steps_per_generation=3), []
    engines = FakeEngines(lambda prompt: ANSWERS[prompt] if prompt in known else [9, 2])

    def refit(version):
        # It learns one reply per iteration.
        known.append(len(known))
        return {}

    run.learn(self_play(run, engines, refit), lambda: None, None)
    equal = [round(metrics["spin/equal"], 6) for _, metrics in run.tracker if "spin/equal" in metrics]
    assert equal == [0, 0.333333, 0.666667]
    # Three, two, one pairs, and as many optimizer steps.
    assert [len(batch) // 2 for batch in run.trainer.seen] == [1] * 6
    assert capsys.readouterr().out == (
        "after step 6 all 3 replies of the policy are those in the data: training ends\n"
    )


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 5])
def test_a_run_that_was_stopped_goes_on_with_the_same_batches(stopped_after, tmp_path):
    """In the middle of an iteration, or between two: with what was sampled and not yet trained on."""

    def learn(folder, steps, refits):
        run = make_training(folder, steps=steps, steps_per_generation=3)
        engines = FakeEngines(lambda prompt: [9, prompt, 2])
        run.learn(self_play(run, engines, lambda version: refits.append(version) or {"refit/bytes": 1.0}), None, None)
        return run

    refits, refits_apart = [], []
    whole = learn(tmp_path / "whole", 7, refits)
    parts = [learn(tmp_path / "parts", steps, refits_apart) for steps in (stopped_after, 7)]
    assert refits_apart == refits == [1, 4, 7]
    apart = [each for part in parts for each in part.trainer.seen]
    for one, other in zip(whole.trainer.seen, apart, strict=True):
        assert one.unit == other.unit
        for name in ("tokens", "lengths"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert one.fields.keys() == other.fields.keys()
        assert all(torch.equal(one.fields[name], other.fields[name]) for name in one.fields)
    assert [numbers_of(line) for part in parts for line in part.tracker] == list(map(numbers_of, whole.tracker))


def numbers_of(line):
    step, metrics = line
    return step, {name: value for name, value in metrics.items() if not name.startswith(("seconds/", "throughput/"))}


def test_a_checkpoint_of_other_data_is_refused_before_anything_starts(training):
    run = training(steps=1)
    run.learn(self_play(run, FakeEngines(lambda prompt: [9, 2]), lambda version: {}), None, None)
    with pytest.raises(UserError, match="prompt sampler has size=3 and this run size=4"):
        training(steps=2).setup.sampler(4, "")


def test_a_pair_that_has_no_place_is_refused_before_anything_starts(training):
    config = training(1).setup.config
    check_lengths([Exchange([1, 1], [2, 2])], config)
    with pytest.raises(UserError, match=r"has 11 tokens, more than loop.max_tokens_per_micro_batch=10: raise"):
        check_lengths([Exchange([1], [2]), Exchange([1, 1], [2, 2, 2])], config)
    config.loop.shared_prefixes, config.loop.max_tokens_per_micro_batch = True, 26
    check_lengths([Exchange([1] * 20, [2, 2])], config)
    config.loop.shared_prefixes = False
    with pytest.raises(UserError, match=r"has 46 tokens, more than loop.max_tokens_per_micro_batch=26"):
        check_lengths([Exchange([1] * 20, [2, 2])], config)


def test_training_ends_with_its_steps_or_when_it_has_converged(tmp_path):
    def make(sampler, _step):
        return [StepBatch(conversation_batch([Conversation([1, sampler.next(1)[0]], [False, True])], "token_mean"))]

    def batches():
        return run.setup.batches(run.setup.sampler(2, ""), make)

    run, measured = make_training(tmp_path / "all", steps=5), []

    def measure():
        measured.append(len(run.trainer.seen))
        return {"sft/exact_match": 0.5}

    run.learn(batches(), lambda: None, Measurement(measure, every=2))
    assert len(run.trainer.seen) == 5
    assert measured == [2, 4, 5]
    run = make_training(tmp_path / "enough", steps=5)
    run.learn(
        batches(),
        lambda: None,
        Measurement(measure, every=2, has_converged=lambda metrics: "sft/exact_match" in metrics),
    )
    assert len(run.trainer.seen) == 2


def test_an_impossible_reply_is_named():
    batch = pair_batch(pairs_against(EXCHANGES, [[9, 2]] * 3))
    log_probs = torch.zeros(len(batch.tokens))
    log_probs[7] = float("-inf")
    with pytest.raises(UserError, match=r"token 1 of the chosen reply of pair 1 \(from 0\) of the batch is -inf"):
        with_reference(batch, log_probs)


def test_pairs_weigh_the_same_whatever_their_lengths():
    pairs = pairs_against(EXCHANGES, [[9] * length for length in (1, 2, 3)])
    batch = pair_batch(pairs)
    assert batch.unit == 2
    weights = batch.fields["weights"].split(batch.lengths.tolist())
    for weight, conversation in zip(weights, [reply for pair in pairs for reply in pair], strict=True):
        assert weight.tolist() == pytest.approx([said / 6 for said in conversation.mask])


def test_layers_that_predict_further_ahead_learn_the_chosen_replies_alone():
    exchanges = [Exchange([1, 3], [5, 6, 2]), Exchange([4], [7, 8, 5, 2]), Exchange([4], [2])]
    batch = pair_batch(pairs_against(exchanges, [[9] * length for length in (4, 2, 3)]))
    starts = batch.lengths.cumsum(0) - batch.lengths
    micro_batch = with_mtp_tokens(pack(batch, range(len(batch)), align=8), 2)
    for layer, count in enumerate(predictable(batch, 2).tolist()):
        learned = [
            token
            for start, length in zip(starts.tolist()[::2], batch.lengths.tolist()[::2], strict=True)
            for place, token in enumerate(batch.tokens[start : start + length].tolist())
            if batch.fields["weights"][start + place] and place >= layer + 2
        ]
        assert micro_batch.mtp.labels[layer][micro_batch.mtp.asked[layer]].tolist() == learned
        assert count == len(learned) > 0


def test_ranks_are_told_which_replies_their_prediction_layers_learn(training):
    run = training(steps=1)
    run.learn(self_play(run, FakeEngines(lambda prompt: [9, 2]), lambda version: {}), lambda: None, None)
    (batch,) = run.trainer.seen
    assert drafted(batch.fields, batch.fields["weights"] != 0).tolist() == 3 * [False, True, True, False, False, False]
