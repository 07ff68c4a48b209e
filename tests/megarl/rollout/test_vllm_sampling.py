from itertools import chain

import numpy as np
import pytest
import torch
from engine_host import END_ID, GREEDY, PROMPTS
from transformers import AutoModelForCausalLM

from converters.errors import UserError
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.transformers.sampling import kept_log_probs

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
pytestmark = pytest.mark.parametrize("kind", ["vllm", SGLANG, "transformers"])


def test_greedy_tokens_are_those_that_transformers_generates(served):
    model = AutoModelForCausalLM.from_pretrained(served.folders[0])
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert served.greedy(prompt).token_ids.tolist() == generated[0, len(prompt) :].tolist()


def test_what_is_streamed_comes_in_pieces_and_is_the_answer(served):
    answer = served.greedy(PROMPTS[0]).token_ids.tolist()
    pieces = list(served.engine.generate_stream(Request(PROMPTS[0], GREEDY)))
    assert len(pieces) > len(answer) // 2
    assert list(chain.from_iterable(pieces)) == answer
    with pytest.raises(UserError, match="a stream of 2 samples"):
        list(served.engine.generate_stream(Request(PROMPTS[0], SamplingParameters(samples=2, max_tokens=4))))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, -1, 1.0), (1.0, 3, 1.0), (0.7, -1, 0.6), (0.7, 6, 0.6)]
)
def test_samples_are_of_the_distribution_whose_log_probs_they_carry(
    served, reference_log_probs, temperature, top_k, top_p
):
    sampling = SamplingParameters(samples=6, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=12, seed=3)
    requests = [Request(prompt, sampling) for prompt in PROMPTS]
    for prompt, generations in zip(PROMPTS, served.engine.generate(requests), strict=True):
        assert len({tuple(generation.token_ids.tolist()) for generation in generations}) > 3
        for generation in generations:
            log_probs = reference_log_probs(served.folders[0], prompt + generation.token_ids.tolist())
            # Its rule is compared with a loop over the tokens where that engine is tested.
            log_probs = kept_log_probs(log_probs[len(prompt) - 1 : -1], sampling)
            expected = log_probs.gather(1, torch.tensor(generation.token_ids).long()[:, None])[:, 0]
            assert torch.allclose(torch.tensor(generation.log_probs), expected, atol=1e-4)


def _token_ids(answers):
    return [[generation.token_ids.tolist() for generation in generations] for generations in answers]


def _log_probs(answers):
    return np.concatenate([generation.log_probs for generations in answers for generation in generations])


def test_a_seed_gives_the_same_samples_whatever_else_is_served(served, kind):
    requests = [Request(prompt, SamplingParameters(samples=6, max_tokens=12, seed=3)) for prompt in PROMPTS]
    answers = served.engine.generate(requests)
    again = served.engine.generate(requests)
    alone = [served.engine.generate([request])[0] for request in requests]
    for others in (again, alone):
        assert _token_ids(others) == _token_ids(answers)
        # SGLang forms its batches by what has come at a step: other sizes, and other last bits of the log-probs.
        assert others == answers or (kind == "sglang" and np.allclose(_log_probs(others), _log_probs(answers)))


def test_neighbouring_seeds_have_different_streams(served):
    requests = [Request(PROMPTS[0], SamplingParameters(samples=4, max_tokens=12, seed=seed)) for seed in range(4)]
    answers = _token_ids(served.engine.generate(requests))
    # Some are the end token alone, whatever the stream.
    long = [tuple(token_ids) for samples in answers for token_ids in samples if len(token_ids) > 2]
    assert len(set(long)) == len(long) > 10


def test_samples_without_a_seed_differ(served):
    (generations,) = served.engine.generate([Request(PROMPTS[0], SamplingParameters(samples=8, max_tokens=12))])
    # Now and then two are the end token alone.
    long = [tuple(generation.token_ids.tolist()) for generation in generations if len(generation.token_ids) > 2]
    assert len(set(long)) == len(long) > 4


def test_seeded_requests_may_be_more_than_one_batch(served):
    request = Request([33] * 100, SamplingParameters(samples=32, max_tokens=3, seed=0))
    (generations,) = served.engine.generate([request])
    assert all(len(generation.token_ids) for generation in generations)


def test_a_stop_token_ends_a_response_and_belongs_to_it(served):
    free = served.greedy(PROMPTS[0])
    stop = next(token for token in free.token_ids[2:].tolist() if token != END_ID)
    sampling = SamplingParameters(temperature=0, max_tokens=16, stop_token_ids=(stop,))
    (generation,) = served.engine.generate([Request(PROMPTS[0], sampling)])[0]
    expected = free.token_ids.tolist()
    assert generation.token_ids.tolist() == expected[: expected.index(stop) + 1]
    assert len(generation.log_probs) == len(generation.token_ids)
    assert generation.finish_reason == "stop"


def test_the_models_own_end_token_ends_a_response(served):
    sampling = SamplingParameters(samples=256, temperature=2.0, max_tokens=40, seed=0)
    (generations,) = served.engine.generate([Request(PROMPTS[0], sampling)])
    stopped = [generation for generation in generations if generation.finish_reason == "stop"]
    assert stopped
    assert all(generation.token_ids.tolist().index(END_ID) == len(generation.token_ids) - 1 for generation in stopped)
    finished = [generation for generation in generations if generation.finish_reason == "length"]
    assert all(len(generation.token_ids) == 40 and END_ID not in generation.token_ids for generation in finished)


def test_requests_that_cannot_be_served(served):
    with pytest.raises(UserError, match=r"3 tokens and 510 new ones do not fit the engine's 512"):
        served.engine.generate([Request(PROMPTS[1], SamplingParameters(max_tokens=510))])
    with pytest.raises(UserError, match="0 samples"):
        served.engine.generate([Request(PROMPTS[1], SamplingParameters(samples=0))])
    for name, value in (("top_p", 1.5), ("top_k", 0), ("temperature", 0.009)):
        with pytest.raises(UserError, match=f"a request with {name}={value}: give"):
            served.engine.generate([Request(PROMPTS[1], SamplingParameters(**{name: value}, max_tokens=9))])
    with pytest.raises(UserError, match="prompt of 0 tokens"):
        served.engine.generate([Request([], SamplingParameters(max_tokens=9))])
    with pytest.raises(UserError, match="outside of the model's vocabulary"):
        served.engine.generate([Request([10**6], SamplingParameters(max_tokens=9))])
    assert served.engine.generate([]) == []
