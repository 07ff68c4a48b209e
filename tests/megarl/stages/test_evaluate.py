"""Held-out prompts to metrics, and how often and with what seeds they are asked."""

import threading
from pathlib import Path

import pytest
from known_metrics import is_known

from converters.errors import UserError
from megarl.data import Prompt, Turn
from megarl.diagnostics.pass_at_k import powers_of_two
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import Scorer
from megarl.schema import MegarlConfig, RewardConfig
from megarl.stages.evaluate import EvalSettings, evaluate

FUNCTIONS = Path(__file__).parents[1] / "reward_functions.py"
TOKENIZER = make_tokenizer()
PROMPTS = [Prompt(0, "sums", [1], "1", {}), Prompt(1, "sums", [2], "2", {}), Prompt(2, "products", [3], "3", {})]


class Engines:
    """Answer each prompt, the last one first, with a digit for each sample; the first sample never comes to an end.

    The function called `between` two prompts may wait, or fail.
    """

    def __init__(self, answers, between=lambda: None):
        self.answers, self.between, self.requests = answers, between, []

    def generate_each(self, requests):
        self.requests = requests
        for place, request in reversed(list(enumerate(requests))):
            first, *others = (TOKENIZER(answer).input_ids for answer in self.answers[place])
            assert len(self.answers[place]) == request.sampling.samples
            ended = [Turn.of([], [*tokens, TOKENIZER.eos_token_id], [0, 0], [4, 4], "stop") for tokens in others]
            yield place, [Turn.of([], first, [0], [4], "length"), *ended]
            self.between()


@pytest.fixture(scope="module")
def scorer():
    with Scorer(RewardConfig(function=f"{FUNCTIONS}:is_truth", on_error="drop", workers=2)) as scorer:
        yield scorer


@pytest.fixture
def run(scorer):
    def run(*answers, prompts=PROMPTS, **options):
        engines = Engines(answers)
        found = evaluate(engines, prompts, scorer, TOKENIZER, EvalSettings(5, (7,), **options))
        assert all(is_known(name) for name in found)
        # No keys and values of theirs are met by samples of training, which have none.
        assert {request.cache_salt for request in engines.requests} == {"evaluation"}
        return found, [request.sampling for request in engines.requests]

    return run


def test_one_response_is_greedy(run):
    found, sampling = run("1", "5", "3")
    assert found == pytest.approx(
        {
            "eval/accuracy": 2 / 3,
            "eval/source/sums/accuracy": 0.5,
            "eval/source/products/accuracy": 1.0,
            "eval/dropped": 0.0,
            "eval/truncated_fraction": 1.0,
            "eval/response_length": 1.0,
        }
    )
    assert {(each.samples, each.temperature, each.max_tokens, each.stop_token_ids) for each in sampling} == {
        (1, 0.0, 5, (7,))
    }


@pytest.mark.parametrize(
    ("samples", "given", "temperature"), [(1, None, 0.0), (1, 0.6, 0.6), (1, 1.0, 1.0), (2, None, 1.0), (2, 0.6, 0.6)]
)
def test_they_are_sampled_at_the_temperature_of_evaluations(scorer, samples, given, temperature):
    """One response without a temperature is greedy; with one, it is sampled as several are."""
    config = MegarlConfig()
    config.rollout.temperature, config.loop.eval_temperature, config.loop.eval_samples = 1.3, given, samples
    engines = Engines(["1" * samples, "2" * samples, "3" * samples])
    evaluate(engines, PROMPTS, scorer, TOKENIZER, EvalSettings.of(config, [7]))
    asked = [each.sampling for each in engines.requests]
    assert [(each.samples, each.temperature) for each in asked] == [(samples, temperature)] * 3
    assert len({each.seed for each in asked}) == (3 if temperature else 1)


def test_one_data_source_is_not_told_twice(run):
    found, _ = run("1", "5", prompts=PROMPTS[:2])
    assert found.keys() == {"eval/accuracy", "eval/dropped", "eval/truncated_fraction", "eval/response_length"}


def test_several_responses_vote_and_compete(run):
    found, _ = run("1155", "4255", "6666", samples=4)
    assert found["eval/accuracy"] == found["eval/mean_at_4"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert found["eval/pass_at_1"] == pytest.approx(0.25)
    assert found["eval/pass_at_2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert found["eval/best_at_4"] == found["eval/pass_at_4"] == pytest.approx(2 / 3)
    assert found["eval/majority_at_4"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert found["eval/source/sums/accuracy"] == pytest.approx(0.375)
    assert found["eval/source/products/best_at_4"] == 0
    assert (found["eval/truncated_fraction"], found["eval/response_length"]) == (0.25, 1.75)
    names = {f"{name}_at_{k}" for name in ("pass", "majority", "best") for k in powers_of_two(4)} | {"mean_at_4"}
    assert {name.split("/")[-1] for name in found if "_at_" in name} == names


def test_responses_that_could_not_be_scored_are_counted_and_left_out(run):
    found, _ = run("18", "22", "88", samples=2)
    assert (found["eval/dropped"], found["eval/accuracy"], found["eval/pass_at_2"]) == (3, 1, 1)
    with pytest.raises(UserError, match="failed for all 3 responses"):
        run("8", "8", "8")


def test_every_prompt_has_random_streams_of_its_own_and_the_same_every_time(run):
    answers = ("11", "22", "33")
    _, sampling = run(*answers, samples=2, temperature=0.6, seed=3)
    assert {(each.samples, each.temperature) for each in sampling} == {(2, 0.6)}
    assert len({each.seed for each in sampling}) == len(PROMPTS)
    assert sampling == run(*answers, samples=2, temperature=0.6, seed=3)[1]
    assert not {each.seed for each in sampling} & {each.seed for each in run(*answers, samples=2, seed=4)[1]}


def test_no_prompt_is_a_conversation_of_training_or_waits_behind_any(scorer):
    engines = Engines(("1", "2", "3"))
    evaluate(engines, PROMPTS, scorer, TOKENIZER, EvalSettings(5, (7,)))
    assert [each.conversation for each in engines.requests] == [each.priority for each in engines.requests]
    # Draws begin with 0.
    assert [each.priority for each in engines.requests] == [-3, -2, -1]


def waiting(seconds):
    """Events that show when scoring by `notes_and_waits` begins and ends, and two prompts with them."""
    events = {"begun": threading.Event(), "ended": threading.Event()}
    return events, [Prompt(index, "sums", [1], "1", {**events, "seconds": seconds}) for index in range(2)]


def test_responses_are_scored_while_others_are_sampled():
    events, prompts = waiting(0)
    with Scorer(RewardConfig(function=f"{FUNCTIONS}:notes_and_waits")) as scorer:
        scored_between = []
        engines = Engines("11", lambda: scored_between.append(events["ended"].wait(30)))
        evaluate(engines, prompts, scorer, TOKENIZER, EvalSettings(5, ()))
    assert scored_between == [True, True]


def test_when_the_engines_fail_no_more_is_scored():
    events, prompts = waiting(99)

    def fail():
        assert events["begun"].wait(30)
        raise RuntimeError("the engine died")

    with Scorer(RewardConfig(function=f"{FUNCTIONS}:notes_and_waits")) as scorer:
        with pytest.raises(RuntimeError, match="the engine died"):
            evaluate(Engines("11", fail), prompts, scorer, TOKENIZER, EvalSettings(5, ()))
        assert events["ended"].wait(30)
