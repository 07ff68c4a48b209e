"""Which requests an engine serves first where it has no room for all."""

import time
from itertools import chain, islice

import pytest

from megarl.rollout.protocol import Progress, Request, RequestEnded, SamplingParameters

ROOM = {
    "vllm": "max_num_seqs",
    "sglang": "max_running_requests",
    "stand-in": "max_running_requests",
    "transformers": "max_num_seqs",
}
"""By kind, the argument that says how many samples there is room for."""
SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)

pytestmark = pytest.mark.parametrize("kind", ["vllm", SGLANG, "stand-in", "transformers"])


def greedy(prompt, max_tokens, priority):
    return Request(prompt, SamplingParameters(temperature=0, max_tokens=max_tokens), priority=priority)


@pytest.fixture(scope="module")
def _started():
    return {}


@pytest.fixture
def engine(host, kind, folders, _started):
    """An engine that has room for one sample."""
    if kind not in _started:
        _started[kind] = host.start(folders[0], **{ROOM[kind]: 1})
    return _started[kind]


def test_what_has_begun_ends_and_then_the_oldest_draw_is_served_first(engine, endless_prompt) -> None:
    told = chain.from_iterable(engine.events())
    engine.submit({50: greedy(endless_prompt, 200, priority=50)})
    assert isinstance(next(told), Progress)
    engine.pause("keep")
    for draw in (90, 10, 40, 11):
        engine.submit({draw: greedy([5, 9, draw % 60], 2, priority=draw)})
    engine.resume()
    ends = (each.number for each in told if isinstance(each, RequestEnded))
    assert list(islice(ends, 5)) == [50, 10, 11, 40, 90]


def test_what_has_no_room_is_aborted_too(engine, endless_prompt) -> None:
    told = chain.from_iterable(engine.events())
    engine.submit({0: greedy(endless_prompt, 400, priority=0)})
    assert isinstance(next(told), Progress)
    engine.submit({draw: greedy(endless_prompt, 400, priority=draw) for draw in (1, 2)})
    # SGLang's server is to have them. Where it is late one may begin, as the first one makes room.
    time.sleep(0.3)
    engine.pause("abort")
    ends = islice((each for each in told if isinstance(each, RequestEnded)), 3)
    answers = {each.number: each.answer[0] for each in ends}
    assert {answer.finish_reason for answer in answers.values()} == {"abort"}
    assert len(answers[0].token_ids) > 0
    assert max(len(answer.token_ids) for answer in answers.values()) < 400
