"""Answers are not kept by those who were told of them."""

import weakref
from concurrent.futures import Future
from types import SimpleNamespace

from megarl.run.in_flight_groups import when_answered


class Tokens:
    """Stands for the arrays of a response."""


def test_answers_are_let_go_without_a_search_for_garbage(without_garbage_collection) -> None:
    asked = [SimpleNamespace(answer=Future()) for _ in range(2)]
    told = []
    when_answered(asked, lambda answers: told.append([type(each.result()) for each in answers]))
    left = []
    for each in asked:
        tokens = Tokens()
        left.append(weakref.ref(tokens))
        each.answer.set_result(tokens)
    del asked, each, tokens
    assert told == [[Tokens, Tokens]]
    assert [each() for each in left] == [None, None]
