"""Which requests an engine serves first where it has no room for all."""

from itertools import chain, islice

import pytest

from megarl.rollout.protocol import Progress, Request, RequestEnded, SamplingParameters


def greedy(prompt, max_tokens, priority):
    return Request(prompt, SamplingParameters(temperature=0, max_tokens=max_tokens), priority=priority)


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_what_has_begun_ends_and_then_the_oldest_draw_is_served_first(host, folders, endless_prompt) -> None:
    engine = host.start(folders[0], max_num_seqs=1)
    told = chain.from_iterable(engine.events())
    engine.submit({50: greedy(endless_prompt, 200, priority=50)})
    assert isinstance(next(told), Progress)
    engine.pause("keep")
    for draw in (90, 10, 40, 11):
        engine.submit({draw: greedy([5, 9, draw % 60], 2, priority=draw)})
    engine.resume()
    ends = (each.number for each in told if isinstance(each, RequestEnded))
    assert list(islice(ends, 5)) == [50, 10, 11, 40, 90]
