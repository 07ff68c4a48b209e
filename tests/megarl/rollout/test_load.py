"""The load of an engine since it was asked for last, and what it computes twice."""

import pytest
from engine_host import Served, vllm_pool
from transformers import AutoConfig

from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.vllm.engine import VllmEngine

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
    engine = host.start(folders[0], **room_for(folders[0]), enable_prefix_caching=False)
    sampling = SamplingParameters(temperature=0, max_tokens=_TOKENS)
    one, other = engine.generate([Request(endless_prompt, sampling, priority=place) for place in range(2)])
    assert one[0].token_ids.tolist() == other[0].token_ids.tolist()
    assert len(one[0].token_ids) == _TOKENS
    # All that filled two blocks.
    assert engine.load().preempted == 2 * _BLOCK
    engine.generate([Request(endless_prompt, sampling)])
    assert engine.load().preempted == 0


def preempted_as_on_a_gpu(folder, room, prompt):
    """Tokens that are counted where vLLM's scheduler serves its second model runner, which no CPU has, before all is
    forgotten and behind that; and how often a sample went on.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    engine = VllmEngine(folder, {**room, "enable_prefix_caching": False})
    engine.start()
    core = engine._core
    scheduler = core._scheduler
    scheduler.use_v2_model_runner = True
    went_on = 0

    def serve(*, forget_after):
        nonlocal went_on
        sampling = SamplingParameters(temperature=0, max_tokens=_TOKENS)
        engine._sequences.add([Request(prompt, sampling, priority=place) for place in range(2)], version=0)
        known, steps = set(), 0
        while scheduler.has_unfinished_requests():
            scheduled = scheduler.schedule()
            assert not scheduled.scheduled_cached_reqs.resumed_req_ids
            new = {each.req_id for each in scheduled.scheduled_new_reqs}
            went_on += len(new & known)
            known |= new
            names = list(scheduled.num_scheduled_tokens)
            places = {name: place for place, name in enumerate(names)}
            output = ModelRunnerOutput(names, places, sampled_token_ids=[[9]] * len(names))
            scheduler.update_from_output(scheduled, output)
            steps += 1
            if steps == forget_after:
                assert core.forget()
        return core.load().preempted

    return serve(forget_after=None), serve(forget_after=20), went_on


@pytest.mark.long
def test_they_are_counted_on_a_gpu_too(folders, endless_prompt):
    room = room_for(folders[0])
    with vllm_pool() as process:
        alone, behind, went_on = process.apply(preempted_as_on_a_gpu, (folders[0], room, endless_prompt))
    # Two are computed again as all was forgotten, and do not count; one of them loses its room later, and does.
    assert (alone, behind) == (2 * _BLOCK, 2 * _BLOCK)
    assert went_on == 1 + 2 + 1


def room_for(folder):
    # One block is vLLM's own.
    room = (_BLOCKS + 1) * _BLOCK * bytes_of_token(folder)
    return {"kv_cache_memory_bytes": room, "max_model_len": 128, "block_size": _BLOCK}


def bytes_of_token(folder):
    config = AutoConfig.from_pretrained(folder)
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_tokens_of_what_is_in_flight_when_all_is_forgotten_are_counted_there(
    host, folders, half_generated, endless_prompt
) -> None:
    engine = host.start(folders[0])
    served = Served(engine, folders)
    assert served.update(served.first, 1) == 0
    generating = half_generated(engine)
    recomputed = served.update(served.first, 2)
    assert len(endless_prompt) < recomputed < len(endless_prompt) + 400
    assert served.update(served.first, 3) == recomputed
    engine.resume()
    assert len(generating.result(60)[0][0].token_ids) == 400
    assert engine.load().preempted == 0
