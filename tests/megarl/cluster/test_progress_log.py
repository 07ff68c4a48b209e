"""Tokens that an engine told of before it died: each is there, once, with the sample that it is of."""

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


@given(NEWS, st.sets(st.integers(0, 4)), st.integers(0, 8))
def test_what_was_told_is_there_by_sample_and_in_order_whenever_the_rest_is_forgotten(
    all_news, numbers, forgets
) -> None:
    partials = ProgressLog()
    expected: dict[int, dict[int, list[int]]] = {}
    for place, news in enumerate(all_news):
        partials.add(progress(news))
        for number, sample, token in news:
            if number in numbers:
                expected.setdefault(number, {}).setdefault(sample, []).append(token)
        if place == forgets:
            partials.keep(numbers)
    found = partials.of(numbers)
    assert {n: {s: each.token_ids.tolist() for s, each in own.items()} for n, own in found.items()} == expected
    for begun in (begun for own in found.values() for begun in own.values()):
        assert begun.log_probs.tolist() == [-token for token in begun.token_ids]
        assert begun.versions.tolist() == [token + 1 for token in begun.token_ids]


def test_a_turn_that_another_engine_ended_is_as_if_it_had_begun_it() -> None:
    begun = PartialSample(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), np.array([1, 1], np.int32))
    experts = (np.zeros(5, dtype="V2"),)
    ended = begun.ended_by(Turn.of([8, 9, 4, 5], [6], [-3], [2], "stop", experts))
    assert ended == Turn.of([8, 9], [4, 5, 6], [-1, -2, -3], [1, 1, 2], "stop", experts)
    whole = Turn.of([8], [6], [-3], [2], "length")
    assert NOTHING.ended_by(whole) == whole
