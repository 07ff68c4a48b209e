"""The load of an engine since it was asked for last, and what it computes twice."""

import pytest
from transformers import AutoConfig

from megarl.rollout.protocol import Request, SamplingParameters

_ROOM = {"vllm": {"max_num_seqs": 2}, "transformers": {"max_num_seqs": 2}}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_an_engine_says_how_much_of_its_room_was_in_use_since_it_was_asked_last(host, kind, folders) -> None:
    engine = host.start(folders[0], **_ROOM[kind])
    assert engine.load() is None
    engine.generate([Request([5, 9, 11], SamplingParameters(samples=5, max_tokens=6, temperature=0))])
    load = engine.load()
    assert 0 < load.running <= 2
    assert (load.waiting, load.preempted) == (3, 0)
    assert load.kv_used is None if kind == "transformers" else 0 < load.kv_used < 1
    assert engine.load() is None


_BLOCK, _BLOCKS = 32, 5
_PROMPT, _TOKENS = 2, 80
"""Two samples of so many tokens have 5 blocks until one of them wants a third block of its own."""


@pytest.mark.parametrize("kind", ["vllm"])
def test_tokens_of_a_sample_that_lost_its_room_are_counted_when_it_goes_on(host, folders, endless_prompt) -> None:
    assert len(endless_prompt) == _PROMPT
    bytes_of_block = _BLOCK * bytes_of_token(folders[0])
    # One block is vLLM's own.
    room = {"kv_cache_memory_bytes": (_BLOCKS + 1) * bytes_of_block, "max_model_len": 128, "block_size": _BLOCK}
    engine = host.start(folders[0], **room, enable_prefix_caching=False)
    sampling = SamplingParameters(temperature=0, max_tokens=_TOKENS)
    one, other = engine.generate([Request(endless_prompt, sampling, priority=place) for place in range(2)])
    assert one[0].token_ids.tolist() == other[0].token_ids.tolist()
    assert len(one[0].token_ids) == _TOKENS
    # All that filled two blocks.
    assert engine.load().preempted == 2 * _BLOCK
    engine.generate([Request(endless_prompt, sampling)])
    assert engine.load().preempted == 0


def bytes_of_token(folder):
    config = AutoConfig.from_pretrained(folder)
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_tokens_of_what_is_in_flight_when_all_is_forgotten_are_counted_there(
    host, folders, half_generated, endless_prompt
) -> None:
    engine = host.start(folders[0])
    assert engine.reset_prefix_cache() == 0
    generating = half_generated(engine)
    recomputed = engine.reset_prefix_cache()
    assert len(endless_prompt) < recomputed < len(endless_prompt) + 400
    assert engine.reset_prefix_cache() == recomputed
    engine.resume()
    assert len(generating.result(60)[0][0].token_ids) == 400
    assert engine.load().preempted == 0
