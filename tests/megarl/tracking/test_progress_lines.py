"""A long step says now and then what it is at, and a short one nothing."""

import threading
import time

import pytest

from megarl.tracking.clock import Clock
from megarl.tracking.progress_lines import progress_lines


def test_what_goes_on_is_said_again_and_again_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    said = iter(["rollout", "", "update"])
    all_said = threading.Event()

    def present() -> str:
        if (text := next(said, None)) is None:
            all_said.set()
        return text or ""

    with progress_lines(present, every_s=0.001):
        assert all_said.wait(30)
    assert capsys.readouterr().out == "rollout\nupdate\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "progress lines"]


def test_a_step_says_where_it_is_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    with clock.stage("rollout"):
        now += 59
        assert clock.status_line(60) == ""
        now += 121
        assert clock.status_line(60) == "rollout, 3 min since the step began"
        with clock.stage("reward"):
            assert clock.status_line(60).startswith("reward, ")
        assert clock.status_line(60).startswith("rollout, ")
    assert clock.status_line(60).startswith("between two stages, ")
    clock.end_step(tokens=1)
    assert clock.status_line(60) == ""
