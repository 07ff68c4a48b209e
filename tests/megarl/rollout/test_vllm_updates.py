import threading
import time
from dataclasses import replace

import pytest
import torch
from engine_host import GREEDY, PROMPTS, Weights

from megarl.data.stretches import fetch
from megarl.rollout.protocol import EngineDiedError, Request, UpdateError

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
pytestmark = pytest.mark.parametrize("kind", ["vllm", SGLANG, "transformers"])


def test_an_update_in_the_middle_of_a_response(served, half_generated, endless_prompt, assert_greedy):
    old = served.engine.version()
    new = old + 3
    generating = half_generated(served.engine)
    served.update(served.second, new)
    served.engine.resume()
    ((generation,),) = generating.result(60)
    assert set(fetch(generation.versions).tolist()) == {old, new}
    versions = fetch(generation.versions).tolist()
    switch = versions.index(new)
    assert versions == [old] * switch + [new] * (len(versions) - switch)
    assert_greedy(served.folders[0], endless_prompt, generation, stop=switch)
    # As if the new model had read everything before: no key or value of the old one is left.
    assert_greedy(served.folders[1], endless_prompt, generation, start=switch)


def test_abort_returns_what_there_is(served, half_generated, endless_prompt, assert_greedy):
    generating = half_generated(served.engine)
    served.engine.pause("abort")
    ((generation,),) = generating.result(60)
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) == len(generation.log_probs) == len(fetch(generation.versions)) < 400
    assert_greedy(served.folders[0], endless_prompt, generation)
    served.engine.resume()
    assert_greedy(served.folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))


def test_an_update_fences_the_engine(served, asked):
    new = served.engine.version() + 1
    served.engine.begin_update(new, served.second.names)
    generating = asked(served.engine).ask(Request(PROMPTS[0], GREEDY))
    for bucket in served.second.buckets:
        served.write(served.second, bucket)
    time.sleep(0.5)
    assert not generating.done()
    served.engine.commit_update(new)
    ((generation,),) = generating.result(60)
    assert set(fetch(generation.versions).tolist()) == {new}


def test_updates_in_the_wrong_order_are_refused(served):
    old, weights = served.engine.version(), served.second
    with pytest.raises(UpdateError, match="write without begin_update"):
        served.write(weights, weights.buckets[0])
    with pytest.raises(UpdateError, match="commit without begin_update"):
        served.engine.commit_update(old + 1)
    with pytest.raises(UpdateError, match=f"update {old} is not newer than the weights of version {old}"):
        served.engine.begin_update(old, weights.names)
    served.engine.begin_update(old + 1, weights.names)
    with pytest.raises(UpdateError, match=f"update {old + 2} cannot begin before {old + 1} was committed"):
        served.engine.begin_update(old + 2, weights.names)
    with pytest.raises(UpdateError, match=f"version {old + 2} cannot be written or committed"):
        served.engine.commit_update(old + 2)
    for bucket in weights.buckets:
        served.write(weights, bucket)
    served.engine.commit_update(old + 1)
    assert served.engine.version() == old + 1


def _renamed(bucket):
    return replace(bucket, entries=(replace(bucket.entries[0], name="surplus"),))


FAULTS = {
    "missing": (lambda served, new, bucket: served.engine.commit_update(new), UpdateError, "tensors were not written"),
    "twice": (lambda served, new, bucket: served.engine.write(bucket), UpdateError, "was already written"),
    "surplus": (lambda served, new, bucket: served.engine.write(_renamed(bucket)), UpdateError, "surplus is not a"),
    "unknown segment": (
        lambda served, new, bucket: served.engine.write(replace(served.second.buckets[1], segment=9)),
        IndexError,
        "list index out of range",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_update_is_refused_and_can_be_repeated(served, model_folder, asked, assert_greedy, fault):
    break_it, error, message = FAULTS[fault]
    # Weights that no other test loads: memory that is not written, but freed by an earlier load, would hold them.
    folder = model_folder("qwen3_moe", 2 + list(FAULTS).index(fault))
    new, weights = served.engine.version() + 1, Weights(folder)
    served.engine.begin_update(new, weights.names)
    # Half of what vLLM joins to one parameter: the gates of some experts without their up projections.
    bucket = weights.buckets[0]
    half = replace(bucket, entries=tuple(entry for entry in bucket.entries if "gate_proj" in entry.name))
    served.write(weights, half)
    with pytest.raises(error, match=message):
        break_it(served, new, half)
    with pytest.raises(UpdateError, match=f"after update {new} failed: begin it again"):
        served.engine.commit_update(new)
    generating = asked(served.engine).ask(Request(PROMPTS[0], GREEDY))
    served.update(weights, new)
    ((generation,),) = generating.result(60)
    assert set(fetch(generation.versions).tolist()) == {new}
    assert_greedy(folder, PROMPTS[0], generation)


def test_calls_of_many_threads(served, pool, assert_greedy):
    old, stop = served.engine.version(), threading.Event()

    def disturb():
        version = old
        while not stop.is_set():
            version += 1
            served.engine.pause("keep")
            served.update(served.second if (version - old) % 2 else served.first, version)
            served.engine.resume()

    disturbing = pool.submit(disturb)
    answers = []
    try:
        while served.engine.version() < old + 3 and not disturbing.done():
            answers += zip(PROMPTS * 4, pool.map(served.greedy, PROMPTS * 4), strict=True)
    finally:
        stop.set()
    disturbing.result(60)
    for prompt, generation in answers:
        versions = fetch(generation.versions).tolist()
        assert versions == sorted(versions)
        for version in set(versions):
            start = versions.index(version)
            folder = served.folders[(version - old) % 2]
            assert_greedy(folder, prompt, generation, start, start + versions.count(version))
    assert {(version - old) % 2 for _, each in answers for version in fetch(each.versions).tolist()} == {0, 1}


def test_a_dying_engine_ends_every_call(fresh, half_generated, asked):
    weights = fresh.second
    weights.tensors["lm_head.weight"] = torch.full_like(weights.tensors["lm_head.weight"], torch.nan)
    waiting = [half_generated(fresh.engine), asked(fresh.engine).ask(Request(PROMPTS[1], GREEDY))]
    fresh.update(weights, 1)
    fresh.engine.resume()
    for generating in waiting:
        with pytest.raises(EngineDiedError, match="log-probabilities"):
            generating.result(60)
    with pytest.raises(EngineDiedError, match="log-probabilities"):
        fresh.engine.generate([Request(PROMPTS[0], GREEDY)])
    with pytest.raises(EngineDiedError, match="log-probabilities"):
        fresh.engine.version()


def test_closing_ends_every_call(host, fresh, half_generated):
    generating = half_generated(fresh.engine)
    host.running = None
    fresh.engine.close()
    with pytest.raises(EngineDiedError, match="closed"):
        generating.result(60)
    with pytest.raises(EngineDiedError, match="closed"):
        fresh.engine.version()
    fresh.engine.close()


def test_workers_that_are_other_processes_than_their_engine_are_recorded(served, kind):
    served.engine.start_profiler()
    assert list(served.engine.stop_profiler(10**6, 0.0)) == (["worker 0"] if kind == "sglang" else [])
