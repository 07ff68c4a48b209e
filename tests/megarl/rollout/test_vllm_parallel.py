"""Engines of two ranks: of tensor parallelism, and of data parallelism with experts shared out."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from engine_host import (
    GREEDY,
    PROMPTS,
    Served,
    check_that_messages_are_recorded,
    check_that_they_listen_here_alone,
)
from eventually import descendants, eventually, has_ended
from traced_layouts import different

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.traced_layout import traced_layout, untraced
from megarl.data.stretches import fetch
from megarl.rollout.protocol import EngineDiedError, Request, SamplingParameters
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.vllm.kind import VLLM
from megatron_ext.memory.device_memory import CountedMemory

KV_CACHE_BYTES = 2**27
"""Memory for keys and values, of each rank."""
BLOCK = [*range(4, 44)]
"""A prompt whose keys and values are kept for the next one that begins so."""


def _segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith("vllm_dist")}


def _sockets():
    """Sockets in /tmp itself, which nothing removes."""
    return {path.name for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


def test_two_tensor_parallel_ranks(engines, folders, make_trainer, pool, assert_greedy, check_experts, tmp_path):
    before, sockets = _segments(), _sockets()
    arguments = {"enable_expert_parallel": True, "enable_return_routed_experts": True}
    served = Served(engines.start(folders[0], tensor_parallel_size=2, **arguments), folders)
    greedy = served.greedy(PROMPTS[0])
    assert_greedy(folders[0], PROMPTS[0], greedy)
    check_experts(folders[0], greedy, ReturnedExperts.of(folders[0]).routing)
    shapes = {name: tuple(tensor.shape) for name, tensor in served.first.tensors.items()}
    traces = [trace.unpacked() for trace in served.engine.trace_layout(shapes, dict.fromkeys(shapes, torch.float32))]
    layout = traced_layout([trace.shard for trace in traces], shapes)
    assert layout.ranks == 2
    assert not untraced(traces)
    # Half of the experts are on the other rank.
    assert len(layout.placements(0)) == len(layout.placements(1)) < len(shapes)
    served.update(served.second, 1)
    assert_greedy(folders[1], PROMPTS[0], served.greedy(PROMPTS[0]))
    trainer = make_trainer(served.engine, folders[0])
    trainer.connect()
    trainer.load(folders[1])
    assert trainer.compare(2) == set()
    trainer.load(folders[0])
    check_that_messages_are_recorded(trainer, served.engine, workers=2)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
    check_that_both_ranks_sleep(served, CountedMemory(tmp_path / "device"))
    check_that_they_listen_here_alone(engines.processes())
    check_that_a_dead_worker_is_noticed(served, trainer, pool)
    engines.close()
    # Segments of an engine that another test starts at this moment have a name until all its ranks have mapped them.
    assert eventually(lambda: _segments() <= before)
    assert eventually(lambda: _sockets() <= sockets)


def check_that_both_ranks_sleep(served, memory):
    served.engine.count_memory(memory)
    before, whole = served.greedy(PROMPTS[0]), memory.take_peak()
    assert whole > 2 * KV_CACHE_BYTES
    served.engine.sleep()
    assert (memory.take_peak(), memory.take_peak()) == (whole, 0)
    served.engine.wake_up(["weights", "kv_cache"])
    assert memory.take_peak() == whole
    assert served.greedy(PROMPTS[0]) == before


def check_that_a_dead_worker_is_noticed(served, trainer, pool):
    """In the middle of a transfer, when the other worker and the engine wait for it."""
    served.engine.begin_update(3, served.first.names)
    receiving = pool.submit(served.engine.receive, 3)
    trainer.stop_sending(3)
    next(process for process, command in descendants().items() if "VLLM::Worker_TP1" in command).kill()
    assert isinstance(error := receiving.exception(250), EngineDiedError)
    assert "a worker of vLLM ended" in str(error)
    with pytest.raises(EngineDiedError, match="the vLLM engine has died"):
        served.engine.commit_update(3)


@pytest.mark.long
def test_two_data_parallel_ranks(engines, folders, make_trainer, pool, asked, assert_greedy, endless_prompt, tmp_path):
    arguments = {"data_parallel_size": 2, "enable_expert_parallel": True}
    assert VLLM.workers(arguments) == 2
    # A rank's process and its worker's are one.
    small = {"distributed_executor_backend": "uni"}
    engine = engines.start(folders[0], **arguments, **small, **VLLM.without_weights)
    served = Served(engine, folders)
    assert engine.version() == -1
    assert engine.worker_parts() == [0, 0]
    check_that_experts_are_shared_out_and_all_else_is_on_both(engine, folders[0])
    trainer = make_trainer(engine, folders[0])
    trainer.connect()
    trainer.load(folders[0])
    trainer.update(1)
    # More requests for one rank than for the other, of different lengths: no step has as many tokens in both.
    requests = [Request(prompt, GREEDY) for prompt in (BLOCK, *PROMPTS)]
    check_greedy(engine, requests, folders[0], 1, assert_greedy)
    check_an_update_in_the_middle(engine, trainer, folders, asked(engine), endless_prompt, assert_greedy)
    check_that_both_ranks_sleep(served, CountedMemory(tmp_path / "device"))
    check_the_fence(served, asked(engine), assert_greedy)
    check_that_nobody_meets_keys_and_values_that_were_kept(served, asked(engine), assert_greedy)
    check_that_a_next_turn_meets_the_keys_and_values_of_the_one_before(engine)
    with pytest.raises(UserError, match="do not fit the engine's"):
        engine.generate([Request(PROMPTS[0], SamplingParameters(max_tokens=1000))])
    check_that_they_listen_here_alone(engines.processes())
    check_that_the_death_of_a_rank_ends_all(served, trainer, engines, asked(engine), pool)


def check_that_nobody_meets_keys_and_values_that_were_kept(served, asked, assert_greedy):
    """Not on either rank: of two requests for the same, each has one."""

    def ask_both_ranks():
        return asked.ask_together([Request(BLOCK, GREEDY)] * 2)

    def of_both_ranks(answers):
        turns = [turn for answer in answers for ((turn,),) in [answer.result(60)]]
        assert turns[0] == turns[1]
        return turns[0], {turn.cached_tokens for turn in turns}

    version = served.engine.version()
    served.update(served.second, version + 1)
    assert [of_both_ranks(ask_both_ranks())[1] for _ in range(2)] == [{0}, {32}]
    served.engine.pause("keep")
    waiting = ask_both_ranks()
    served.update(served.first, version + 2, kv="keep")
    served.engine.resume()
    for ask, expected in ((lambda: waiting, 0), (ask_both_ranks, 32)):
        turn, cached = of_both_ranks(ask())
        assert cached == {expected}
        assert_greedy(served.folders[0], BLOCK, turn)


def check_that_a_next_turn_meets_the_keys_and_values_of_the_one_before(engine):
    """A rank has every other conversation. A next turn goes where the one before was, unless that is much busier."""

    def ask(*conversations, turn):
        prompts = {number: [number, *BLOCK, *[9] * turn] for number in conversations}
        asked = [Request(prompt, GREEDY, conversation=number) for number, prompt in prompts.items()]
        return [turns[0].cached_tokens for turns in engine.generate(asked)]

    assert ask(*range(4, 12), turn=0) == [0] * 8
    # Both are idle, and the first is one that the first conversation asked was not on.
    assert ask(5, 4, turn=1) == [32, 32]
    # All were on one rank, which is three conversations busier than the other when the last is asked for.
    assert ask(4, 6, 8, 10, turn=2) == [32, 32, 32, 0]
    assert ask(10, turn=3) == [32]


def check_that_experts_are_shared_out_and_all_else_is_on_both(engine, folder):
    architecture = read_architecture(read_json(folder / CONFIG))
    packed = engine.trace_layout(architecture.hf_shapes, architecture.hf_dtypes(torch.float32))
    traces = [trace.unpacked() for trace in packed]
    assert not untraced(traces)
    sizes = ParallelSizes(world_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert different(architecture, traces, sizes) == set()


def check_greedy(engine, requests, folder, version, assert_greedy):
    together = engine.generate(requests)
    for request, (turn,) in zip(requests, together, strict=True):
        assert_greedy(folder, request.prompt_token_ids, turn)
        assert set(fetch(turn.versions).tolist()) == {version}
    # To the last bit, also where one of the ranks has nothing.
    assert [engine.generate([request])[0] for request in requests] == together


def check_an_update_in_the_middle(engine, trainer, folders, asked, prompt, assert_greedy):
    """While a response is in flight on one rank, and at times nothing on the other."""
    generating = asked.begin(Request(prompt, SamplingParameters(temperature=0, max_tokens=400)))
    # Each has a token in every step.
    engine.generate([Request(BLOCK, GREEDY)])
    engine.pause("keep")
    trainer.load(folders[1])
    check_that_messages_are_recorded(trainer, engine, workers=2)
    assert not generating.done()
    engine.resume()
    check_greedy(engine, [Request(BLOCK, GREEDY)], folders[1], 2, assert_greedy)
    engine.pause("abort")
    ((turn,),) = generating.result(60)
    engine.resume()
    assert turn.finish_reason == "abort"
    versions = fetch(turn.versions).tolist()
    switch = versions.index(2)
    assert versions == [1] * switch + [2] * (len(versions) - switch)
    assert_greedy(folders[0], prompt, turn, stop=switch)
    assert_greedy(folders[1], prompt, turn, start=switch)


def check_the_fence(served, asked, assert_greedy):
    """While the path of the loader fills all ranks, which were asleep when it began."""
    served.engine.sleep()
    served.engine.begin_update(3, served.first.names)
    served.engine.wake_up(["weights"])
    served.engine.wake_up(["kv_cache"])
    generating = asked.ask(Request(PROMPTS[1], GREEDY))
    for bucket in served.first.buckets:
        served.write(served.first, bucket)
    time.sleep(0.5)
    assert not generating.done()
    served.engine.commit_update(3)
    ((turn,),) = generating.result(60)
    assert set(fetch(turn.versions).tolist()) == {3}
    assert_greedy(served.folders[0], PROMPTS[1], turn)


def check_that_the_death_of_a_rank_ends_all(served, trainer, engines, asked, pool):
    """In the middle of a transfer, when the other rank, the engine and a request wait for it."""
    version = served.engine.version() + 1
    served.engine.begin_update(version, served.first.names)
    generating = asked.ask(Request(PROMPTS[0], GREEDY))
    receiving = pool.submit(served.engine.receive, version)
    trainer.stop_sending(version)
    processes = {name: each for each in engines.processes() if "VLLM::" in (name := "".join(each.cmdline()))}
    assert len(processes) == 3
    processes["VLLM::EngineCore_DP1"].kill()
    for waiting in (receiving, generating):
        assert isinstance(error := waiting.exception(250), EngineDiedError)
        assert "a data-parallel rank ended: EngineCore_DP1 with exit code -9" in str(error)
    with pytest.raises(EngineDiedError, match="EngineCore_DP1"):
        served.engine.version()
    engines.close()
    assert eventually(lambda: all(map(has_ended, processes.values())))


LONG_WORK = """
import multiprocessing, os, time
from functools import partial
from megarl.rollout.vllm.processes import _run

work = partial(_run, os.getpid(), "subprocess", "time", "sleep", 600)
rank = multiprocessing.get_context("spawn").Process(target=work)
rank.start()
print(rank.pid, flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_an_engine_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", LONG_WORK], stdout=subprocess.PIPE, text=True) as engine:
        rank = psutil.Process(int(engine.stdout.readline()))
        assert rank.is_running()
        engine.kill()
    assert eventually(lambda: has_ended(rank))
