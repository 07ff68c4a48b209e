"""Tokens that an engine told of before it died: each is there, once, with the sample that it is of."""

import tracemalloc
from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.engines.progress_log import NOTHING, PartialSample, ProgressLog
from megarl.data import Turn
from megarl.rollout.protocol import Progress

News = list[tuple[int, int, int]]
"""Tokens as they are sampled: of which request, of which sample, and the token itself."""
NEWS: st.SearchStrategy[list[News]] = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 99)), min_size=1, max_size=12), max_size=8
)


def progress(news: News) -> Progress:
    pieces = [(whose, [token for *_, token in each]) for whose, each in groupby(news, key=lambda one: one[:2])]
    tokens = [token for _, each in pieces for token in each]
    numbers, samples = np.array([whose for whose, _ in pieces], np.int32).T
    lengths = np.array([len(each) for _, each in pieces], np.int32)
    ids = np.array(tokens, np.int32)
    return Progress(numbers, samples, lengths, ids, -ids.astype(np.float32), ids + 1)


@given(NEWS, st.sets(st.integers(0, 4)), st.sets(st.integers(0, 8)), st.integers(0, 8))
def test_what_was_told_is_there_by_sample_and_in_order_whenever_the_rest_is_forgotten(
    all_news, numbers, forgets, copied
) -> None:
    partials = ProgressLog()
    expected: dict[int, dict[int, list[int]]] = {}
    for place, news in enumerate(all_news):
        partials.add(progress(news))
        for number, sample, token in news:
            if number in numbers:
                expected.setdefault(number, {}).setdefault(sample, []).append(token)
        if place in forgets:
            partials.keep(numbers)
        if place == copied:
            others, partials = partials, partials.copy()
            others.add(progress(news))
            others.keep(numbers)
    found = partials.of(numbers)
    assert {n: {s: each.token_ids.tolist() for s, each in own.items()} for n, own in found.items()} == expected
    for begun in (begun for own in found.values() for begun in own.values()):
        assert begun.log_probs.tolist() == [-token for token in begun.token_ids]
        assert begun.versions.tolist() == [token + 1 for token in begun.token_ids]


def told(number: int, samples: int, tokens: int) -> Progress:
    """New tokens of each sample of a request."""
    ones = np.ones(samples, np.int32)
    ids = np.zeros(samples * tokens, np.int32)
    return Progress(ones * number, np.arange(samples, dtype=np.int32), ones * tokens, ids, -ids.astype(np.float32), ids)


def test_no_token_is_copied_again_and_again_while_a_response_grows(monkeypatch) -> None:
    copied, concatenate = [], np.concatenate

    def counting(arrays, *arguments):
        copied.append(sum(map(len, arrays)))
        return concatenate(arrays, *arguments)

    monkeypatch.setattr(np, "concatenate", counting)
    partials = ProgressLog()
    for _ in range(40):
        for _ in range(8):
            partials.add(told(7, 4, 100))
        partials.keep([7])
    # Three values of each token, besides whose they are.
    assert sum(copied) < 1.1 * 3 * 40 * 8 * 4 * 100
    assert [len(each.token_ids) for each in partials.of([7])[7].values()] == [40 * 8 * 100] * 4


def test_a_response_that_goes_on_keeps_nothing_of_those_beside_it_that_have_ended() -> None:
    partials, long, short = ProgressLog(), 0, 10_000
    tracemalloc.start()
    for number in range(1, 31):
        partials.add(told(long, 1, 10))
        partials.add(told(number, 1, short))
        partials.keep([long, number])
    partials.keep([long])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 3 * 4 * short
    assert len(partials.of([long])[long][0].token_ids) == 300


def test_a_turn_that_another_engine_ended_is_as_if_it_had_begun_it() -> None:
    begun = PartialSample(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), np.array([1, 1], np.int32))
    experts = (np.zeros(5, dtype="V2"),)
    ended = begun.ended_by(Turn.of([8, 9, 4, 5], [6], [-3], [2], "stop", experts))
    assert ended == Turn.of([8, 9], [4, 5, 6], [-1, -2, -3], [1, 1, 2], "stop", experts)
    whole = Turn.of([8], [6], [-3], [2], "length")
    assert NOTHING.ended_by(whole) == whole
