"""Every second of a run belongs to one step, and there to one stage or to the overhead."""

import time

import pytest

from megarl.tracking.clock import Clock


def test_stages_and_overhead_add_up_to_the_step():
    clock = Clock()
    for _ in range(2):
        with clock.stage("rollout"):
            time.sleep(0.01)
    time.sleep(0.02)
    metrics = clock.end_step(tokens=100)
    assert metrics["seconds/rollout"] >= 0.02
    assert metrics["seconds/overhead"] >= 0.02
    assert metrics["seconds/rollout"] + metrics["seconds/overhead"] == pytest.approx(metrics["seconds/step"])
    assert metrics["throughput/tokens_per_s"] == pytest.approx(100 / metrics["seconds/step"])


def test_what_happens_between_two_steps_belongs_to_the_later_one():
    clock = Clock()
    clock.end_step(tokens=1)
    with clock.stage("checkpoint"):
        time.sleep(0.02)
    metrics = clock.end_step(tokens=1)
    assert metrics["seconds/step"] >= metrics["seconds/checkpoint"] >= 0.02
    assert "seconds/checkpoint" not in clock.end_step(tokens=1)


def test_failed_stage_is_counted():
    clock = Clock()
    with pytest.raises(KeyError), clock.stage("reward"):
        raise KeyError
    assert "seconds/reward" in clock.end_step(tokens=1)
