"""Held-out prompts to metrics, and how often and with what seeds they are asked."""

import pytest

from megarl.config.schema import RewardConfig
from megarl.data import Prompt
from megarl.dynamics.validation import powers_of_two
from megarl.rollout.protocol import Generation
from megarl.stages.evaluate import evaluate
from megarl.tracking.metrics import is_known

PROMPTS = [Prompt(0, "sums", [1], "1", {}), Prompt(1, "sums", [2], "2", {}), Prompt(2, "products", [3], "3", {})]


class Tokenizer:
    def batch_decode(self, token_ids, skip_special_tokens):
        return ["".join(str(token) for token in tokens if token < 9 or not skip_special_tokens) for tokens in token_ids]


class Engines:
    """Answer in turn with what `answers` holds for each prompt: token 9 is the end, to which the first never comes."""

    def __init__(self, answers):
        self.answers, self.requests, self.resets = answers, [], 0

    def generate_each(self, requests):
        self.requests = requests
        for place, request in reversed(list(enumerate(requests))):
            answers = self.answers[request.prompt_token_ids[0]][: request.sampling.samples]
            assert len(answers) == request.sampling.samples
            first, *others = answers
            ended = [Generation([token, 9], [0.0, 0.0], [4, 4], "stop") for token in others]
            yield place, [Generation([first], [0.0], [4], "length"), *ended]

    def reset_prefix_cache(self):
        self.resets += 1


def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "8":
        raise ValueError("no answer")
    return float(solution_str == ground_truth)


def run(answers, prompts=PROMPTS, **options):
    engines = Engines(answers)
    found = evaluate(
        *(engines, prompts, score, Tokenizer(), RewardConfig(on_error="drop")),
        max_tokens=5,
        stop_token_ids=[7],
        **options,
    )
    assert all(is_known(name) for name in found)
    assert engines.resets == 1
    return found, [request.sampling for request in engines.requests]


def test_one_response_is_greedy():
    found, sampling = run({1: [1], 2: [5], 3: [3]})
    assert found == pytest.approx(
        {
            "eval/accuracy": 2 / 3,
            "eval/source/sums/accuracy": 0.5,
            "eval/source/products/accuracy": 1.0,
            "eval/dropped": 0.0,
            "eval/cut_fraction": 1.0,
            "eval/response_length": 1.0,
        }
    )
    assert {(each.samples, each.temperature, each.max_tokens, each.stop_token_ids) for each in sampling} == {
        (1, 0.0, 5, (7,))
    }


def test_one_data_source_is_not_told_twice():
    found, _ = run({1: [1], 2: [5]}, PROMPTS[:2])
    assert found.keys() == {"eval/accuracy", "eval/dropped", "eval/cut_fraction", "eval/response_length"}


def test_several_responses_vote_and_compete():
    found, _ = run({1: [1, 1, 5, 5], 2: [4, 2, 5, 5], 3: [6, 6, 6, 6]}, samples=4)
    assert found["eval/accuracy"] == found["eval/mean_at_4"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert found["eval/pass_at_1"] == pytest.approx(0.25)
    assert found["eval/pass_at_2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert found["eval/best_at_4"] == found["eval/pass_at_4"] == pytest.approx(2 / 3)
    assert found["eval/majority_at_4"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert found["eval/source/sums/accuracy"] == pytest.approx(0.375)
    assert found["eval/source/products/best_at_4"] == 0
    assert (found["eval/cut_fraction"], found["eval/response_length"]) == (0.25, 1.75)
    names = {f"{name}_at_{k}" for name in ("pass", "majority", "best") for k in powers_of_two(4)} | {"mean_at_4"}
    assert {name.split("/")[-1] for name in found if "_at_" in name} == names


def test_responses_that_could_not_be_scored_are_counted_and_left_out():
    found, _ = run({1: [1, 8], 2: [2, 2], 3: [8, 8]}, samples=2)
    assert (found["eval/dropped"], found["eval/accuracy"], found["eval/pass_at_2"]) == (3, 1, 1)


def test_every_prompt_has_random_streams_of_its_own_and_the_same_every_time():
    answers = {1: [1, 1], 2: [2, 2], 3: [3, 3]}
    _, sampling = run(answers, samples=2, temperature=0.6, seed=3)
    assert {(each.samples, each.temperature) for each in sampling} == {(2, 0.6)}
    assert len({each.seed for each in sampling}) == len(PROMPTS)
    assert sampling == run(answers, samples=2, temperature=0.6, seed=3)[1]
    assert not {each.seed for each in sampling} & {each.seed for each in run(answers, samples=2, seed=4)[1]}
