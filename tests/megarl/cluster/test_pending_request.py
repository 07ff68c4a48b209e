"""A request of which some samples were cut: what is asked for again, and how much of it is computed again."""

import json

from megarl.cluster.engines.pending_request import PendingRequest
from megarl.data import Turn
from megarl.rollout.protocol import Request, SamplingParameters

PROMPT = [7, 8]


def turn(finish_reason: str, token_ids: list[int], begun: list[int], version: int) -> Turn:
    count = len(token_ids)
    return Turn.of([*PROMPT, *begun], token_ids, [-0.5] * count, [version] * count, finish_reason)


def begun_of(asked: PendingRequest) -> dict[int, list[int]]:
    return {sample: list(token_ids) for sample, token_ids in asked.rest().begun.items()}


def test_a_request_that_is_cut_twice_is_whole_in_the_end_and_what_has_ended_is_not_computed_again() -> None:
    asked = PendingRequest(1, Request(PROMPT, SamplingParameters(samples=3, max_tokens=8)), among=[])
    asked.keep_answer([turn("abort", [1, 2], [], 0), turn("abort", [3], [], 0), turn("abort", [], [], 0)])
    assert begun_of(asked) == {0: [1, 2], 1: [3], 2: []}
    assert asked.tokens == 2 + 3
    asked.keep_answer([turn("stop", [4], [1, 2], 1), turn("abort", [5, 6], [3], 1), turn("abort", [9], [], 1)])
    assert begun_of(asked) == {1: [3, 5, 6], 2: [9]}
    assert asked.tokens == 2 + 4
    # Another run may go on from here.
    again = PendingRequest(2, asked.request, among=[])
    again.keep_turns(asked.partial_turns())
    assert begun_of(again) == begun_of(asked)
    for each in (asked, again):
        each.keep_answer([turn("length", [7], [3, 5, 6], 2), turn("stop", [9], [9], 2)])
        whole = each.whole()
        assert [each.token_ids.tolist() for each in whole] == [[1, 2, 4], [3, 5, 6, 7], [9, 9]]
        assert [list(each.versions) for each in whole] == [[0, 0, 1], [0, 1, 1, 2], [1, 2]]
        assert [each.prompt_ids.tolist() for each in whole] == [PROMPT] * 3
        assert [each.finish_reason for each in whole] == ["stop", "length", "stop"]


def test_tokens_that_an_engine_has_told_of_go_to_another_as_the_arrays_that_they_are() -> None:
    asked = PendingRequest(1, Request(PROMPT, SamplingParameters(samples=2, max_tokens=8)), among=[])
    asked.keep_answer([turn("abort", [1, 2], [], 0), turn("stop", [3], [], 0)])
    rest = asked.rest()
    assert rest.begun[0] is asked.begun[0].token_ids
    # Behind the prompt, where an engine has them, they are ints as those of the prompt.
    assert json.dumps(rest.prompt_of(0)) == "[7, 8, 1, 2]"
