"""An engine that sleeps gives its memory back, and is the same when it wakes; nothing is asked of it in between."""

from contextlib import contextmanager, suppress

import psutil
import pytest
from engine_host import PROMPTS, Served

from megatron_ext.memory.device_memory import CountedMemory, DeviceFullError

pytestmark = pytest.mark.parametrize("kind", ["vllm", "transformers"])
KV_CACHE_BYTES = 2**27


@pytest.fixture
def sleeper(kind, request, host, folders, tmp_path):
    """An engine with the weights of the first folder, in memory of its own: transformers maps files that it reads."""
    if kind == "vllm":
        served = request.getfixturevalue("served")
    else:
        served = Served(host.start(folders[0], load_format="dummy"), folders)
        served.update(served.first, 1)
    yield served
    # The next test has the same engine, also where this one failed.
    served.engine.count_memory(CountedMemory(tmp_path / "another"))
    served.engine.wake_up(["weights", "kv_cache"])


@contextmanager
def refused(missing):
    with pytest.raises(RuntimeError, match=f"the engine sleeps, without its {missing}"):
        yield


def test_an_engine_sleeps_and_is_updated_before_it_is_awake(sleeper, kind, tmp_path, assert_greedy):
    # One of transformers has keys and values of requests alone.
    kv_cache_bytes = KV_CACHE_BYTES if kind == "vllm" else 0
    served, engine, memory = sleeper, sleeper.engine, CountedMemory(tmp_path / "device")
    engine.count_memory(memory)
    before = served.greedy(PROMPTS[0])
    whole = memory.take_peak()
    assert memory.take_peak() == whole

    engine.sleep()
    assert (memory.take_peak(), memory.take_peak()) == (whole, 0)
    with refused("kv_cache"):
        served.greedy(PROMPTS[0])
    engine.wake_up(["weights"])
    weights = memory.take_peak()
    assert 0.9 < weights / sum(tensor.nbytes for tensor in served.first.tensors.values()) < 1.2
    assert 0.9 * kv_cache_bytes <= whole - weights <= kv_cache_bytes
    with refused("kv_cache"):
        served.greedy(PROMPTS[0])
    # A checkpoint, for one, is the trainers' turn after that of a refit.
    engine.sleep()
    assert memory.take_peak() == weights
    engine.wake_up(["weights", "kv_cache"])
    assert memory.take_peak() == whole
    after = served.greedy(PROMPTS[0])
    assert (after.token_ids.tolist(), after.log_probs.tolist()) == (
        before.token_ids.tolist(),
        before.log_probs.tolist(),
    )

    # Touched by the first awakening, so that it is resident.
    resident = rss()
    engine.sleep()
    assert resident - rss() > kv_cache_bytes * 0.9 - 2**24
    version = engine.version() + 1
    engine.begin_update(version, served.second.names)
    with refused("weights"):
        served.write(served.second, served.second.buckets[0])
    engine.wake_up(["weights"])
    served.update(served.second, version)
    engine.wake_up(["kv_cache"])
    assert_greedy(served.folders[1], PROMPTS[1], served.greedy(PROMPTS[1]))


def test_an_engine_does_not_wake_where_there_is_no_room(sleeper, kind, tmp_path):
    served, engine = sleeper, sleeper.engine
    part, room = ("the kv_cache", 2**22) if kind == "vllm" else ("the weights", 2**20)
    other = CountedMemory(tmp_path / "device")
    engine.count_memory(CountedMemory(tmp_path / "device", limit_bytes=2**28))
    engine.sleep()
    other.hold("training", 2**28 - room)
    with pytest.raises(DeviceFullError, match=rf"{part} of an engine, [0-9,]* bytes, do not fit"):
        engine.wake_up(["weights", "kv_cache"])
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        served.greedy(PROMPTS[0])
    other.hold("training", 0)
    engine.wake_up(["weights", "kv_cache"])
    served.greedy(PROMPTS[0])


def rss():
    """Resident bytes of all children, of which one has vLLM's engine; one of transformers is in this process."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += child.memory_info().rss
    return found
