"""Calls that SGLang's server refuses: the engine says so, and goes on with what it serves."""

import time
from typing import get_args

import pytest
from engine_host import PROMPTS
from sglang_stand_in import REFUSED_ONCE

from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout.protocol import EngineMemory, Request, SamplingParameters
from megarl.rollout.sglang.client import CallRefusedError
from megatron_ext import device

LONG = SamplingParameters(temperature=0, max_tokens=450)


@pytest.fixture(scope="module")
def engine(start_stand_in, folders):
    return start_stand_in(folders[0])


@pytest.fixture
def refuse(folders):
    """Lets the server refuse the next call of a path."""
    script = folders[0] / REFUSED_ONCE
    yield script.write_text
    assert not script.exists(), "a call that was not made"


@pytest.fixture
def assert_serves(engine, pool):
    """Check that a request is answered; one that is never sent would be waited for for ever."""

    def check():
        ((turn,),) = pool.submit(engine.generate, [Request(PROMPTS[0], SamplingParameters(max_tokens=4))]).result(60)
        assert turn.finish_reason in ("length", "stop")

    yield check
    engine.pause("abort")
    engine.resume()


def test_it_goes_on_where_it_could_not_forget(engine, refuse, assert_serves, monkeypatch):
    # As on GPUs.
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    engine.sleep()
    refuse("/flush_cache")
    with pytest.raises(CallRefusedError, match="not this time"):
        engine.wake_up(get_args(EngineMemory))
    assert_serves()


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update", "/end_weight_update"])
def test_it_goes_on_where_its_workers_could_not_be_called(engine, refuse, assert_serves, path):
    refuse(path)
    with pytest.raises(CallRefusedError, match="not this time"):
        engine.call_receivers(WeightReceiver.has_rdma_port)
    assert_serves()
    engine.call_receivers(WeightReceiver.has_rdma_port)


def test_it_goes_on_after_a_pause_that_could_not_end_what_it_serves(engine, refuse, assert_serves, pool):
    generating = pool.submit(engine.generate, [Request(PROMPTS[0], LONG)] * 8)
    deadline = time.monotonic() + 60
    while not engine._in_flight.asked() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine._in_flight.asked()
    refuse("/abort_request")
    with pytest.raises(CallRefusedError, match="not this time"):
        engine.pause("abort")
    engine.resume()
    assert_serves()
    assert len(generating.result(60)) == 8


def test_memory_of_a_gpu_that_is_released_is_not_released_again(engine, assert_serves, monkeypatch):
    monkeypatch.setattr("megarl.rollout.sglang.engine.device.backend", lambda: "nccl")
    # As around a refit in a shared pool, and a checkpoint after it.
    for parts in (["weights"], ["kv_cache"], ["weights", "kv_cache"], []):
        engine.sleep()
        engine.wake_up(parts)
    engine.sleep()
    engine.wake_up(["weights", "kv_cache"])
    assert_serves()


def test_workers_of_a_gpu_are_called_while_their_weights_are_there_alone(engine, assert_serves, monkeypatch):
    """The server would end: it reads weights before and after each call."""
    monkeypatch.setattr("megarl.rollout.sglang.engine.device.backend", lambda: "nccl")
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps, without its weights: it is not its turn"):
        engine.start_profiler()
    engine.wake_up(["weights"])
    engine.start_profiler()
    engine.wake_up(["kv_cache"])
    assert_serves()
    assert len(engine.stop_profiler(10**6, 0.0)) == 1


def test_it_goes_on_where_some_requests_could_not_be_ended(engine, assert_serves, pool, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    engine.submit({7: Request(PROMPTS[0], LONG)})
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_abort_some", fail)
        with pytest.raises(ZeroDivisionError):
            engine.abort([7])
    assert_serves()
