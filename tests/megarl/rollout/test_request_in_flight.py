"""How many tokens are computed again for requests in flight."""

from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import RequestInFlight, SampleInFlight, tokens_of


def test_a_prompt_counts_once_and_each_sample_that_goes_on_with_all_that_it_has():
    sampling = SamplingParameters(samples=8, max_tokens=5000)
    continued = RequestInFlight(Request([5] * 100, sampling, begun={sample: [7] * 4000 for sample in range(8)}))
    new = RequestInFlight(Request([5] * 50, sampling))
    samples = [SampleInFlight(each, sample, [9]) for each in (continued, new) for sample in range(8)]
    unbegun = SampleInFlight(RequestInFlight(Request([5] * 30, sampling)), 0)
    assert tokens_of([*samples, unbegun]) == 100 + 8 * 4000 + 8 + 50 + 8
