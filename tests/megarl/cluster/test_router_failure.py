"""A router that can hear no answers any more."""

import time

import pytest

from megarl.cluster.engines.restarts import Restarts, StartStages
from megarl.cluster.engines.router import Router
from megarl.rollout.protocol import Request, SamplingParameters


class Broken(Restarts):
    @property
    def calls(self):
        raise ZeroDivisionError("a mistake")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_asked_of_a_router_that_failed_while_nothing_was_asked_fails_too():
    router = Router([], Broken(1, StartStages(lambda _: iter(()), lambda _: iter(())), up_within_s=1, start_within_s=1))
    # As between two rollouts: the stream of an engine is open, and nobody waits for anything.
    router.queue._streams[object()] = None
    router.begin([], [])
    deadline = time.monotonic() + 20
    while router._listener.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    (asked,) = router.begin([Request([1], SamplingParameters())], [])
    with pytest.raises(RuntimeError, match=r"the router failed: ZeroDivisionError\('a mistake'\)"):
        asked.answer.result(5)
