"""Samples that SGLang's server ends of itself: it calls them aborted, as those that it was told to abort."""

import pytest

from megarl.data import Turn
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import RequestInFlight, SampleInFlight
from megarl.rollout.sglang.client import CallRefusedError
from megarl.rollout.sglang.samples import Limits, ended, hear

LIMITS = Limits(tokens=100, vocabulary=1000)
REQUEST = Request([5, 9], SamplingParameters(max_tokens=4))


def heard(end: dict) -> Turn | None:
    """The turn of a sample that ends so with its second token. Shaped as SGLang 0.5.23's `FINISH_ABORT.to_json`."""
    sample = SampleInFlight(RequestInFlight(REQUEST), 0, [40], [-0.5], [3])
    about = {
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.25, 41, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "finish_reason": {"type": "abort", "err_type": None, **end},
    }
    hear(sample, {"output_ids": [41], "meta_info": about})
    return ended(REQUEST, sample, about, LIMITS)


def test_a_sample_that_is_refused_is_not_asked_for_again() -> None:
    with pytest.raises(CallRefusedError, match=r"^the grammar is none$"):
        heard({"status_code": 400, "message": "the grammar is none"})
    for status in (500, 503):
        with pytest.raises(RuntimeError, match=rf"SGLang gave a sample up: out of memory \({status}\)"):
            heard({"status_code": status, "message": "out of memory"})


@pytest.mark.parametrize("end", [{"status_code": None, "message": "Aborted"}, {"message": "Abort in waiting queue"}])
def test_one_that_was_aborted_is_cut(end: dict) -> None:
    turn = heard(end)
    assert turn is not None
    assert (turn.finish_reason, turn.token_ids.tolist()) == ("abort", [40, 41])
