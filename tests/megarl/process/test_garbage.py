"""A process does not search for garbage in what was there before."""

import gc
import weakref

from megarl.process.garbage import what_there_is_left_alone


class Node:
    def __init__(self):
        self.itself = self


def test_no_search_goes_through_what_there_was_and_then_it_may_be_garbage():
    before = Node()
    old = weakref.ref(before)
    with what_there_is_left_alone():
        del before
        new = weakref.ref(Node())
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    gc.collect()
    assert old() is None
