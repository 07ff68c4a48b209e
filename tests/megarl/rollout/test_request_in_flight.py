"""How many tokens are computed again for requests in flight, and which ends of samples are told of."""

import pytest

from megarl.data import Turn
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import RequestInFlight, SampleInFlight, tokens_of


def test_a_prompt_counts_once_and_each_sample_that_goes_on_with_all_that_it_has():
    sampling = SamplingParameters(samples=8, max_tokens=5000)
    continued = RequestInFlight(Request([5] * 100, sampling, begun={sample: [7] * 4000 for sample in range(8)}))
    new = RequestInFlight(Request([5] * 50, sampling))
    samples = [SampleInFlight(each, sample, [9]) for each in (continued, new) for sample in range(8)]
    unbegun = SampleInFlight(RequestInFlight(Request([5] * 30, sampling)), 0)
    assert tokens_of([*samples, unbegun]) == 100 + 8 * 4000 + 8 + 50 + 8


@pytest.mark.parametrize(
    ("reasons", "told"), [(["stop", "length", "stop"], 2), (["stop", "abort", "abort"], 1), (["abort"] * 3, 0)]
)
def test_ends_before_the_last_are_told_of_whenever_somebody_begins_to_listen_but_no_cut(reasons, told):
    heard = []
    for begins in range(3):
        request, before = RequestInFlight(Request([5], SamplingParameters(samples=3))), len(heard)
        for place, reason in enumerate(reasons):
            if place == begins:
                for end in request.future.ends:
                    end.add_done_callback(heard.append)
            # In any order of the samples.
            request.finish(2 - place, Turn.of([5], [place], [-1.0], [0], reason))
        assert len(heard) - before == told
        assert [turn.token_ids.tolist() for turn in request.future.result(0)] == [[2], [1], [0]]
