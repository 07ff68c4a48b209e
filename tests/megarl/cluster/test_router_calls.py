"""Calls that the controller begins in engines: what becomes of one that fails, and what each of them costs."""

import pytest
import ray

from megarl.cluster.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("shared_cluster", "script")


def test_calls_that_fail_are_heard_of_wait_for_their_turn_and_share_what_is_large(open_group, monkeypatch):
    """In one test, because processes take seconds to start."""
    with open_group(2, restarts=1) as (engines, refit):
        check_that_names_are_put_once(refit, monkeypatch)


def check_that_names_are_put_once(refit, monkeypatch):
    begun, begin = [], Worker.begin

    def noting(self, method, *arguments):
        begun.append((method, *arguments))
        return begin(self, method, *arguments)

    monkeypatch.setattr(Worker, "begin", noting)
    refit(0)
    (first, second) = [names for method, *_, names in begun if method == "begin_update"]
    assert isinstance(first, ray.ObjectRef)
    assert first == second
