"""Signals that end a program: one way of ending, an exit code each, and what may not be cut short is not."""

import signal
import time

import pytest

from megarl.process.signals import asked_to_stop, held, interruption

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def handlers():
    """Handlers of a program in the foreground; afterwards the present ones."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", CODES)
def test_each_signal_interrupts_with_its_exit_code(number):
    with interruption() as ending:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert ending.exit_code == CODES[number]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_second_signal_does_not_disturb_the_ending_and_a_late_one_starts_it_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with interruption() as ending:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        now[0] += 60
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert ending.exit_code == CODES[signal.SIGINT]


def test_an_ignored_sigint_is_listened_to_and_a_sighup_that_nohup_ignores_is_not():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruption(), asked_to_stop(waits=True) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_what_is_held_is_done_whole():
    done = []

    def tidy_up():
        with held():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    with interruption() as ending:
        with pytest.raises(KeyboardInterrupt):
            tidy_up()
        assert done == ["all"]
        assert ending.exit_code == CODES[signal.SIGHUP]


@pytest.mark.parametrize(("waits", "count", "expected"), [(True, 1, ["the step"]), (True, 2, []), (False, 1, [])])
def test_a_stop_that_waits_comes_after_the_step_and_the_second_signal_at_once(waits, count, expected, capfd):
    done = []

    def step():
        with asked_to_stop(waits=waits) as stop:
            assert not stop
            for _ in range(count):
                signal.raise_signal(signal.SIGTERM)
            assert stop
            done.append("the step")

    with interruption() as ending, pytest.raises(KeyboardInterrupt):
        step()
    assert done == expected
    assert ending.exit_code == 143
    said = "megarl: SIGTERM: this step is finished and saved, then the run ends; the same again ends it now\n"
    assert capfd.readouterr().err == (said if waits else "")
