"""A request of which some samples were cut: what is asked for again, and how much of it is computed again."""

from megarl.cluster.asked import Asked
from megarl.data import Turn
from megarl.rollout.protocol import Request, SamplingParameters

PROMPT = [7, 8]


def turn(finish_reason: str, token_ids: list[int], begun: list[int], version: int) -> Turn:
    count = len(token_ids)
    return Turn.of([*PROMPT, *begun], token_ids, [-0.5] * count, [version] * count, finish_reason)


def test_a_request_that_is_cut_twice_is_whole_in_the_end_and_what_has_ended_is_not_computed_again() -> None:
    asked = Asked(1, Request(PROMPT, SamplingParameters(samples=3, max_tokens=8)), among=[])
    asked.keep_answer([turn("abort", [1, 2], [], 0), turn("abort", [3], [], 0), turn("abort", [], [], 0)])
    assert asked.rest().begun == {0: [1, 2], 1: [3], 2: []}
    assert asked.tokens == 2 + 3
    asked.keep_answer([turn("stop", [4], [1, 2], 1), turn("abort", [5, 6], [3], 1), turn("abort", [9], [], 1)])
    assert asked.rest().begun == {1: [3, 5, 6], 2: [9]}
    assert asked.tokens == 2 + 4
    # Another run may go on from here.
    again = Asked(2, asked.request, among=[])
    again.keep_turns(asked.so_far())
    assert again.rest() == asked.rest()
    for each in (asked, again):
        each.keep_answer([turn("length", [7], [3, 5, 6], 2), turn("stop", [9], [9], 2)])
        whole = each.whole()
        assert [each.token_ids.tolist() for each in whole] == [[1, 2, 4], [3, 5, 6, 7], [9, 9]]
        assert [list(each.versions) for each in whole] == [[0, 0, 1], [0, 1, 1, 2], [1, 2]]
        assert [each.prompt_ids.tolist() for each in whole] == [PROMPT] * 3
        assert [each.finish_reason for each in whole] == ["stop", "length", "stop"]
