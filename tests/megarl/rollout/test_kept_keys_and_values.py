"""Weights that change while responses in flight keep their keys and values, and what meets these afterwards."""

import time

import pytest
import torch
from engine_host import GREEDY
from transformers import AutoModelForCausalLM

from megarl.data.stretches import here
from megarl.rollout.protocol import Request

pytestmark = pytest.mark.parametrize("kind", ["vllm", "transformers"])

LONG = [7 + place % 50 for place in range(200)]
"""A prompt that fills blocks of vLLM's, so that others find it there."""


@torch.no_grad()
def greedy_over(cache_of, model_of, prompt, token_ids, switch):
    """Log-probs [tokens, vocabulary] of one model for a response of which another has read all before `switch`."""
    old, new = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (cache_of, model_of)
    )
    read = len(prompt) + switch - 1
    sequence = torch.tensor([prompt + token_ids])
    kept = old(sequence[:, :read], use_cache=True).past_key_values
    return new(sequence[:, read:], past_key_values=kept, use_cache=True).logits[0, :-1].log_softmax(-1)


def test_what_is_in_flight_goes_on_with_what_the_older_weights_have_read(
    served, half_generated, endless_prompt, assert_greedy, reference_log_probs
):
    old, new = served.engine.version(), served.engine.version() + 1
    generating = half_generated(served.engine)
    served.update(served.second, new, kv="keep")
    served.engine.resume()
    ((turn,),) = generating.result(60)
    versions, token_ids = here(turn.versions).tolist(), turn.token_ids.tolist()
    switch = versions.index(new)
    assert versions == [old] * switch + [new] * (len(versions) - switch)
    assert_greedy(served.folders[0], endless_prompt, turn, stop=switch)
    best = greedy_over(*served.folders, endless_prompt, token_ids, switch).max(-1)
    assert token_ids[switch:] == best.indices.tolist()
    sampled = torch.tensor(turn.log_probs)[switch:]
    assert torch.allclose(sampled, best.values, atol=1e-5)
    again = reference_log_probs(served.folders[1], endless_prompt + token_ids)[len(endless_prompt) - 1 : -1][switch:]
    assert (sampled - again[range(len(sampled)), token_ids[switch:]]).abs().max() > 1e-2


def test_a_new_request_meets_no_keys_and_values_of_older_weights(served, pool, half_generated, assert_greedy):
    new = served.engine.version() + 1
    served.engine.generate([Request(LONG, GREEDY)])
    generating = half_generated(served.engine)
    # It waits, and has read nothing.
    waiting = pool.submit(served.greedy, LONG)
    time.sleep(0.2)
    served.update(served.second, new, kv="keep")
    served.engine.resume()
    for turn in (waiting.result(60), served.greedy(LONG)):
        assert set(here(turn.versions).tolist()) == {new}
        assert_greedy(served.folders[1], LONG, turn)
    assert len(generating.result(60)[0][0].token_ids) > 0
