"""The order in which a source sends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.resharding.direct.schedule import sending_order


def order_of(source: int, sources: int, destinations: int, messages) -> list[tuple[int, int, int]]:
    """(destination, part, bytes) in the order in which they are sent."""
    columns = (np.array(column, np.int64) for column in zip(*messages, strict=True))
    return [messages[i] for i in sending_order(source, sources, destinations, *columns)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 12, 31, 64])
def test_sources_at_the_same_pace_are_never_at_the_same_destination(ranks: int) -> None:
    messages = [(to, 0, 100) for to in range(ranks)]
    orders = np.array([[to for to, *_ in order_of(source, ranks, ranks, messages)] for source in range(ranks)])
    for at_once in orders.T:
        assert sorted(at_once) == list(range(ranks))


def test_sources_that_follow_each_other_begin_far_apart() -> None:
    messages = [(to, 0, 100) for to in range(64)]
    first = [order_of(source, 256, 64, messages)[0][0] for source in range(256)]
    # A quarter of the ranks, one pipeline stage, begins at places all over the ring.
    for stage in range(0, 256, 64):
        assert len(set(first[stage : stage + 64])) > 50


def test_large_messages_come_first_and_destinations_take_turns() -> None:
    messages = [(0, 0, 10), (1, 0, 100), (1, 1, 100), (2, 0, 10), (3, 0, 120), (3, 1, 120), (3, 2, 3)]
    # The ring is 0, 3, 2, 1, and source 0 is at the place of 0.
    assert order_of(0, 4, 4, messages) == [
        (3, 0, 120),
        (1, 0, 100),
        (3, 1, 120),
        (1, 1, 100),
        (3, 2, 3),
        (0, 0, 10),
        (2, 0, 10),
    ]


@given(st.data())
def test_every_message_is_sent_once_and_each_destination_gets_its_own_in_order(data) -> None:
    sources, destinations = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    parts = data.draw(st.lists(st.integers(0, 4), min_size=destinations, max_size=destinations))
    messages = [(to, part, data.draw(st.integers(1, 2**40))) for to, n in enumerate(parts) for part in range(n)]
    if not messages:
        return
    sent = order_of(data.draw(st.integers(0, sources - 1)), sources, destinations, messages)
    assert sorted(sent) == sorted(messages)
    for destination in range(destinations):
        own = [part for to, part, _ in sent if to == destination]
        assert own == sorted(own)
