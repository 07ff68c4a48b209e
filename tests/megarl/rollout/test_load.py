"""The load of an engine since it was asked for last."""

import pytest

from megarl.rollout.protocol import Request, SamplingParameters

_ROOM = {"vllm": {"max_num_seqs": 2}, "transformers": {"max_num_seqs": 2}}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_an_engine_says_how_much_of_its_room_was_in_use_since_it_was_asked_last(host, kind, folders) -> None:
    engine = host.start(folders[0], **_ROOM[kind])
    assert engine.load() is None
    engine.generate([Request([5, 9, 11], SamplingParameters(samples=5, max_tokens=6, temperature=0))])
    load = engine.load()
    assert 0 < load.running <= 2
    assert load.waiting == 3
    assert load.kv_used is None if kind == "transformers" else 0 < load.kv_used < 1
    assert engine.load() is None
