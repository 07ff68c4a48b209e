"""SGLang's own server: what every test of the protocol asks, and what there is of it alone (`make test-sglang`)."""

import functools
import os
import signal
from pathlib import Path
from typing import get_args

import psutil
import pytest
from engine_host import (
    GREEDY,
    PROMPTS,
    Served,
    check_that_changes_any_serving,
    check_that_they_listen_here_alone,
    semaphores,
)
from safetensors.torch import load_file

from converters.errors import UserError
from megarl.resharding.direct.connections import TransferError
from megarl.rollout.protocol import EngineDiedError, EngineMemory, Request, SamplingParameters, UpdateError
from megarl.rollout.returned_experts import ReturnedExperts
from megatron_ext.memory.device_memory import CountedMemory

pytestmark = [pytest.mark.sglang, pytest.mark.parametrize("kind", ["sglang"])]
JOINED = "model.layers.1.self_attn.qkv_proj.weight"
long = functools.partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "tied", "arguments"),
    [
        ("qwen3_moe", False, {"load_format": "dummy", "enable_return_routed_experts": True}),
        long("qwen3", True, {"load_format": "dummy"}),
        long("qwen3_moe", False, {"tp_size": 2, "ep_size": 2}),
        # One worker has a key-value head, the other zeros in place of one.
        long("qwen2", True, {"tp_size": 2}),
        long("gemma2", True, {}),
        long("deepseek_v3", False, {"load_format": "dummy", "enable_return_routed_experts": True}),
        long("deepseek_v3", False, {"tp_size": 2}),
    ],
)
def test_greedy_equals_huggingface_before_and_after_updates_and_sleep(
    host, model_folder, assert_greedy, check_experts, make_trainer, tmp_path, name, tied, arguments
):
    folders = [model_folder(name, seed, tied) for seed in (0, 1)]
    served = Served(host.start(folders[0], **arguments), folders)
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]

    def check(folder, version):
        assert served.engine.version() == version
        for prompt, (generation,) in zip(PROMPTS, served.engine.generate(requests), strict=True):
            assert_greedy(folder, prompt, generation)
            assert generation.versions.tolist() == [version] * len(generation.token_ids)
            if "enable_return_routed_experts" in arguments:
                check_experts(folder, generation, ReturnedExperts.of(folder).routing)

    if "load_format" in arguments:
        with pytest.raises(UpdateError, match="dummy weights"):
            served.engine.generate(requests)
    else:
        check(folders[0], 0)
    served.update(served.second, 1)
    check(folders[1], 1)
    served.update(served.first, 5)
    check(folders[0], 5)
    memory = CountedMemory(tmp_path / "device")
    served.engine.count_memory(memory)
    served.engine.sleep()
    assert (memory.take_peak() > 0, memory.take_peak()) == (True, 0)
    served.engine.wake_up(get_args(EngineMemory))
    check(folders[0], 5)
    served.engine.sleep()
    served.engine.wake_up(["weights"])
    served.update(served.second, 6)
    served.engine.wake_up(["kv_cache"])
    check(folders[1], 6)
    # Straight into the parameters, byte for byte what the loader has put there.
    trainer = make_trainer(served.engine, folders[1])
    assert [trace.untraced for trace in trainer.spec.traces] == [{}] * arguments.get("tp_size", 1)
    trainer.connect()
    trainer.load(folders[1])
    assert trainer.compare(7) == set()
    trainer.load(folders[0])
    trainer.update(8)
    check(folders[0], 8)


def test_weights_are_written_straight_into_its_parameters(served, folders, make_trainer, assert_greedy):
    trainer = make_trainer(served.engine, folders[0])
    assert [trace.untraced for trace in trainer.spec.traces] == [{}]
    check_that_changes_any_serving(trainer, served, assert_greedy)
    trainer.load(folders[0])
    trainer.connect()
    assert trainer.compare(served.engine.version() + 1) == set()
    trainer.load(folders[1])
    assert {"lm_head.weight", JOINED} <= trainer.compare(served.engine.version() + 2)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_weights_come_from_another_machine(served, folders, make_trainer, assert_greedy, transport):
    trainer = make_trainer(served.engine, folders[0])
    check_that_changes_any_serving(trainer, served, assert_greedy, transport)


def test_a_transfer_that_fails_leaves_the_engine_fenced(served, folders, make_trainer, assert_greedy):
    trainer = make_trainer(served.engine, folders[0])
    trainer.connect(timeout_s=120.0)
    trainer.load(folders[1])
    trainer.ranks[1].break_at("packed", 1, "kill")
    new = served.engine.version() + 1
    served.engine.begin_update(new, list(trainer.spec.architecture.hf_shapes))
    trainer.begin_send(new)
    with pytest.raises(TransferError, match="is gone"):
        served.engine.receive(new)
    with pytest.raises(UpdateError, match=f"after update {new} failed: begin it again"):
        served.engine.commit_update(new)
    served.update(served.first, new)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))


def test_it_sleeps_and_is_the_same_when_it_wakes(served, tmp_path):
    engine, memory = served.engine, CountedMemory(tmp_path / "device")
    engine.count_memory(memory)
    before = served.greedy(PROMPTS[0])
    whole = memory.take_peak()
    engine.sleep()
    assert (memory.take_peak(), memory.take_peak()) == (whole, 0)
    with pytest.raises(RuntimeError, match="the engine sleeps, without its kv_cache"):
        served.greedy(PROMPTS[0])
    engine.wake_up(["weights"])
    weights = sum(tensor.nbytes for tensor in load_file(served.folders[0] / "model.safetensors").values())
    assert 0.9 < memory.take_peak() / weights < 1.2
    engine.wake_up(["kv_cache"])
    assert memory.take_peak() == whole
    after = served.greedy(PROMPTS[0])
    assert after.token_ids.tolist() == before.token_ids.tolist()


@pytest.mark.parametrize(
    ("victim", "tp_size", "left"),
    [("the server", 1, {"sglang_loads"}), long("a worker", 2, {"sglang_loads", "sgl_shm_mq"})],
)
def test_a_killed_server_is_noticed_and_leaves_nothing(
    host, folders, half_generated, monkeypatch, victim, tp_size, left
):
    # As in a run of one machine.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    engine = host.start(folders[0], tp_size=tp_size)
    folder = Path(engine._server._folder)
    root = psutil.Process(engine._server._process.pid)
    workers = root.children(recursive=True)
    check_that_they_listen_here_alone([root, *workers])
    mapped = semaphores([root, *workers])
    waiting = half_generated(engine)
    scheduler = next(each for each in workers if "scheduler" in "".join(each.cmdline()))
    os.kill(root.pid if victim == "the server" else scheduler.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SGLang engine"):
        waiting.result(120)
    with pytest.raises(EngineDiedError, match="SGLang engine"):
        engine.generate([Request(PROMPTS[0], SamplingParameters())])
    segments = [Path("/dev/shm", note.name) for note in folder.glob("*segments/*")]
    # Their names end with a number of an instance or a process, and a random one.
    assert {each.name.rsplit("_", 2)[0] for each in {*segments} - mapped if each.exists()} == left
    host.close()
    assert psutil.wait_procs([root, *workers], timeout=120)[1] == []
    assert not folder.exists()
    # Processes that are forked share what they lock by without a name.
    assert bool(mapped) == (tp_size > 1)
    assert not any(each.exists() for each in {*segments, *mapped})


def test_arguments_that_it_does_not_have_are_told_before_it_starts(host, folders, kind):
    with pytest.raises(UserError, match=r"tp_sise: the installed SGLang has no such option; did you mean .*tp_size"):
        host.start(folders[0], tp_sise=2)
    host.running = None
