"""Weights that change while responses in flight keep their keys and values, and what meets these afterwards."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from asked_engine import AskedEngine
from engine_host import GREEDY, queueing
from transformers import AutoModelForCausalLM

from megarl.data.stretches import fetch
from megarl.rollout.protocol import Request

every_kind = pytest.mark.parametrize("kind", ["vllm", "transformers"])

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


@pytest.fixture
def check_kept(endless_prompt, assert_greedy):
    """Check a greedy answer to `endless_prompt` during which weights were committed as `new`; its new log-probs."""

    def check(folders, turn, old, new):
        versions, token_ids = fetch(turn.versions).tolist(), turn.token_ids.tolist()
        switch = versions.index(new)
        assert versions == [old] * switch + [new] * (len(versions) - switch)
        assert_greedy(folders[0], endless_prompt, turn, stop=switch)
        best = greedy_over(*folders, endless_prompt, token_ids, switch).max(-1)
        assert token_ids[switch:] == best.indices.tolist()
        sampled = torch.tensor(turn.log_probs)[switch:]
        assert torch.allclose(sampled, best.values, atol=1e-5)
        return sampled

    return check


@every_kind
def test_what_is_in_flight_goes_on_with_what_the_older_weights_have_read(
    served, half_generated, endless_prompt, check_kept, reference_log_probs
):
    old, new = served.engine.version(), served.engine.version() + 1
    generating = half_generated(served.engine)
    served.update(served.second, new, kv="keep")
    served.engine.resume()
    ((turn,),) = generating.result(60)
    sampled = check_kept(served.folders, turn, old, new)
    token_ids = turn.token_ids.tolist()
    again = reference_log_probs(served.folders[1], endless_prompt + token_ids)[len(endless_prompt) - 1 : -1]
    again = again[range(len(token_ids)), token_ids][-len(sampled) :]
    assert (sampled - again).abs().max() > 1e-2


def kept_by_a_queueing_engine(folders, prompt):
    """Answers of an engine that has a batch on its way when the weights change, and the version before that."""
    served = queueing(folders)
    engine, generating = served.engine, []
    served.update(served.first, old := engine.version() + 1)
    with ThreadPoolExecutor() as pool:
        # Begun one after the other, each is in batches of its own, and one of the two is always on its way.
        asked = AskedEngine(engine, pool)
        for _ in range(2):
            generating.append(asked.begin(Request(prompt, replace(GREEDY, max_tokens=400))))
        engine.pause("keep")
        served.update(served.second, old + 1, kv="keep")
        engine.resume()
        return old, [each.result(60)[0][0] for each in generating]


@pytest.mark.long
def test_a_batch_that_is_on_its_way_is_of_the_weights_that_compute_it(with_queueing, folders, check_kept):
    old, turns = with_queueing(kept_by_a_queueing_engine)
    for turn in turns:
        check_kept(folders, turn, old, old + 1)


@every_kind
def test_a_new_request_meets_no_keys_and_values_of_older_weights(served, asked, half_generated, assert_greedy):
    new = served.engine.version() + 1
    served.engine.generate([Request(LONG, GREEDY)])
    generating = half_generated(served.engine)
    # It waits, and has read nothing.
    waiting = asked(served.engine).ask(Request(LONG, GREEDY))
    served.update(served.second, new, kv="keep")
    served.engine.resume()
    for turn in (waiting.result(60)[0][0], served.greedy(LONG)):
        assert set(fetch(turn.versions).tolist()) == {new}
        assert_greedy(served.folders[1], LONG, turn)
    assert len(generating.result(60)[0][0].token_ids) > 0
