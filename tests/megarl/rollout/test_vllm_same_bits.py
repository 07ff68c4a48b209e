"""Responses of vLLM on a CPU that depend on their request alone, to the last bit: tokens and log-probabilities."""

import math
import random
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from transformers import AutoConfig

from megarl.rollout.protocol import Request, SamplingParameters

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Case:
    block: int
    """Tokens whose keys and values are kept together; a model with latent attention has it from vLLM."""
    blocks: int
    """Room for so many: fewer than the `CROWD` needs."""
    exact: bool = True
    """Whether even the last bits are the same: latent attention multiplies by other kernels."""


MODELS = {"qwen3": Case(32, 15), "qwen3_moe": Case(32, 15), "deepseek_v3": Case(16, 30, exact=False)}
NEW_TOKENS = 96


def _requests():
    draw = random.Random(0)
    prompts = [[draw.randrange(4, 60) for _ in range(length)] for length in (24, 26, 27, 28, 29, 30, 31, 3, 33, 64, 70)]
    # Beginnings whose keys and values others have computed.
    prompts += [[*prompts[-1][:40], 9, 9], [*prompts[-1][:65], 5]]
    sampling = SamplingParameters(samples=2, max_tokens=NEW_TOKENS)
    return [Request(prompt, replace(sampling, seed=seed)) for seed, prompt in enumerate(prompts)]


REQUESTS = _requests()
CROWD = REQUESTS[:7]
"""Requests that share no keys and values, and all begin at once."""


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


@pytest.fixture
def engine(engines, model_folder, model):
    folder, case = model_folder(model, 0), MODELS[model]
    arguments = {"block_size": case.block} if case.exact else {}
    arguments["kv_cache_memory_bytes"] = case.blocks * case.block * _bytes_per_token(folder)
    return engines.start(folder, max_model_len=256, **arguments)


def _bytes_per_token(folder):
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "kv_lora_rank"):
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * config.head_dim
    return config.num_hidden_layers * width * 4


def check_same(expected, found, model):
    assert len(expected) == len(found)
    for turns, others in zip(expected, found, strict=True):
        for (tokens, log_probs), (other_tokens, other_log_probs) in zip(turns, others, strict=True):
            assert tokens == other_tokens
            if MODELS[model].exact:
                assert log_probs == other_log_probs
            else:
                assert np.allclose(log_probs, other_log_probs, atol=1e-5)


def sampled(turns):
    return [(turn.token_ids.tolist(), turn.log_probs.tolist()) for turn in turns]


def generate(engine, requests):
    return [sampled(turns) for turns in engine.generate(requests)]


def test_a_response_is_the_same_whatever_is_served_with_it(engine, model, pool):
    alone = []
    for number, request in enumerate(REQUESTS):
        alone += generate(engine, [replace(request, cache_salt=f"alone {number}")])
    # At first nothing is found in the cache, then blocks of the prompts.
    began = time.monotonic()
    check_same(alone, generate(engine, REQUESTS), model)
    whole_s = time.monotonic() - began
    check_that_some_are_preempted(alone[: len(CROWD)], MODELS[model])
    check_same(alone[: len(CROWD)], generate(engine, CROWD), model)
    for seed in range(3):
        check_same(alone, arriving_anyhow(engine, pool, random.Random(seed)), model)
    # Where something else delayed the run that was timed, few are cut.
    cuts = (check_same_when_aborted(engine, pool, alone, model, whole_s / 2**attempt) for attempt in range(4))
    assert any(count > len(REQUESTS) for count in cuts)


def check_that_some_are_preempted(answers, case):
    samples = [
        (len(request.prompt_token_ids), len(tokens))
        for request, turns in zip(CROWD, answers, strict=True)
        for tokens, _ in turns
    ]
    needed = [
        sum(math.ceil((prompt + step) / case.block) for prompt, length in samples if length > step)
        for step in range(NEW_TOKENS)
    ]
    # One block is vLLM's own.
    assert needed[0] < case.blocks <= max(needed)


def arriving_anyhow(engine, pool, draw):
    order = draw.sample(range(len(REQUESTS)), len(REQUESTS))
    answers = {}
    for number in order:
        answers[number] = pool.submit(generate, engine, [REQUESTS[number]])
        time.sleep(draw.random() * 0.1)
    return [answers[number].result(60)[0] for number in range(len(REQUESTS))]


def check_same_when_aborted(engine, pool, expected, model, whole_s):
    """Abort all at random moments, until they have ended, and return how often a sample was continued.

    Undisturbed, all take `whole_s` seconds: a tenth of them passes between two moments.
    """
    draw, cuts = random.Random(5), 0
    begun = [{sample: ([], []) for sample in range(request.sampling.samples)} for request in REQUESTS]
    ended = [dict.fromkeys(range(request.sampling.samples)) for request in REQUESTS]
    while any(begun):
        rest = {
            number: replace(REQUESTS[number], begun={sample: tokens for sample, (tokens, _) in samples.items()})
            for number, samples in enumerate(begun)
            if samples
        }
        cuts += sum(bool(tokens) for request in rest.values() for tokens in request.begun.values())
        generating = pool.submit(engine.generate, list(rest.values()))
        time.sleep((0.05 + draw.random() * 0.1) * whole_s)
        engine.pause("abort")
        engine.resume()
        for (number, request), turns in zip(rest.items(), generating.result(60), strict=True):
            for sample, turn, (tokens, log_probs) in zip(request.samples, turns, sampled(turns), strict=True):
                whole = tuple(
                    old + new for old, new in zip(begun[number].pop(sample), (tokens, log_probs), strict=True)
                )
                (begun if turn.finish_reason == "abort" else ended)[number][sample] = whole
    check_same(expected, [list(samples.values()) for samples in ended], model)
    return cuts
