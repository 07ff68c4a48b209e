"""The SGLang engine over a server that has the rules of SGLang's, which are checked against SGLang's own, too."""

import functools
import itertools
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from engine_host import END_ID, GREEDY, PROMPTS, Served, Weights, check_that_messages_are_recorded
from safetensors.torch import load_file
from sglang_rules import RULES, stopped_scheduler

from converters.errors import UserError
from megarl.cluster.engines.progress_log import ProgressLog
from megarl.data.stretches import fetch, fetch_concatenated
from megarl.rollout.protocol import (
    EngineDiedError,
    Progress,
    Request,
    SamplingParameters,
    UpdateError,
)
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sglang import installation, tracing
from megarl.rollout.sglang.calls import REFUSED
from megarl.rollout.sglang.client import ServerGoneError
from megarl.rollout.sglang.engine import SglangEngine
from megarl.rollout.transformers.sampling import kept_log_probs

LIMIT = 512
USUAL = {"context_length": LIMIT, "max_total_tokens": 16384}
SERVERS = [pytest.param("stand-in"), pytest.param("real", marks=pytest.mark.sglang)]


@pytest.fixture(scope="session")
def start(start_stand_in, folders):
    """Starts engines over the stand-in."""
    return functools.partial(start_stand_in, folders[0])


@pytest.fixture(scope="session")
def _over_stand_in(start, folders):
    # As the one over SGLang's own: so few that tests may leave no room.
    return Served(start(max_running_requests=30), folders)


@pytest.fixture
def served(_over_stand_in):
    """An engine over the stand-in that tests use one after the other, with the weights of the first folder."""
    served = _over_stand_in
    version = served.engine.version()
    if version > 0:
        served.update(served.first, version + 1)
    return served


@pytest.fixture
def fresh(start, folders):
    """An engine over the stand-in of this test's own."""
    return Served(start(), folders)


@pytest.fixture
def engine(request):
    """An engine over a server of either kind."""
    return request.getfixturevalue("served" if request.param == "stand-in" else "sglang_served").engine


@pytest.mark.parametrize("engine", SERVERS, indirect=True)
@pytest.mark.parametrize("rule", RULES)
def test_a_server_keeps_the_rules(engine, rule):
    RULES[rule](engine)


@pytest.mark.parametrize("engine", SERVERS, indirect=True)
def test_messages_of_a_refit_are_in_what_its_worker_recorded(engine, folders, make_trainer):
    trainer = make_trainer(engine, folders[0])
    trainer.connect()
    trainer.load(folders[0])
    check_that_messages_are_recorded(trainer, engine, workers=1)


def test_a_scheduler_that_stands_still_gives_no_sign_of_life(served, pool):
    with stopped_scheduler(served.engine):
        asked = pool.submit(served.engine.version)
        time.sleep(1)
        assert not asked.done()
        # Whatever else is asked of the engine does not wait behind that.
        assert served.engine.load() is None
    assert asked.result(60) == served.engine.version()


def expected(weights, prompt, tokens=16):
    """Greedy tokens of the stand-in's model, and their log-probs."""
    token, token_ids, log_probs = prompt[-1], [], []
    for _ in range(tokens):
        row = weights.tensors["model.embed_tokens.weight"][token] @ weights.tensors["lm_head.weight"].T
        log_prob, best = row.double().log_softmax(-1).max(-1)
        token = int(best)
        token_ids.append(token)
        log_probs.append(float(log_prob))
        if token == END_ID:
            break
    return token_ids, log_probs


def assert_of(weights, prompt, turn):
    token_ids, log_probs = expected(weights, prompt)
    assert turn.token_ids.tolist() == token_ids
    assert turn.log_probs.tolist() == pytest.approx(log_probs, abs=1e-5)


@pytest.fixture
def long_prompt(served):
    """A prompt whose greedy response has 450 tokens."""
    return next([token] for token in range(4, 60) if len(expected(served.first, [token], 450)[0]) == 450)


@pytest.fixture
def endless(asked, long_prompt):
    """Begins a request of which some tokens of each sample are there, and not all."""

    def begin(engine, samples=1):
        sampling = SamplingParameters(samples=samples, temperature=0, max_tokens=450)
        generating = asked(engine).begin(Request(long_prompt, sampling))
        assert not generating.done()
        return generating

    return begin


def test_the_experts_that_the_server_tells_of_are_those_of_the_tokens(start, folders, asked, long_prompt):
    engine, returned = start(enable_return_routed_experts=True), ReturnedExperts.of(folders[0])
    sampling = SamplingParameters(samples=3, max_tokens=7, seed=5)
    turns = [turn for of_prompt in engine.generate([Request(each, sampling) for each in PROMPTS]) for turn in of_prompt]
    assert len({tuple(turn.token_ids) for turn in turns}) > 6
    for turn in turns:
        fed = np.concatenate([turn.prompt_ids, turn.token_ids])[:-1]
        rows = np.stack([fed[:, None] + layer + np.arange(2) for layer in returned.layers], 1) % 4
        assert np.array_equal(fetch_concatenated([turn.routed_experts]), returned.routing.records(rows, len(fed) + 1))
    # Whoever goes on with what was cut has the experts of all its tokens.
    engine.pause("keep")
    waiting = asked(engine).ask(Request(PROMPTS[0], sampling))
    engine.pause("abort")
    (turns,) = waiting.result(60)
    assert {turn.routed_experts for turn in turns} == {()}
    engine.resume()
    cut = asked(engine).begin(Request(long_prompt, SamplingParameters(temperature=0, max_tokens=450)))
    engine.pause("abort")
    ((turn,),) = cut.result(60)
    assert (turn.finish_reason, len(turn.token_ids) > 0, turn.routed_experts) == ("abort", True, ())


def test_an_update_brings_new_tokens_and_their_version(served):
    assert_of(served.first, PROMPTS[0], served.greedy(PROMPTS[0]))
    old = served.engine.version()
    served.update(served.second, old + 1)
    turn = served.greedy(PROMPTS[0])
    assert_of(served.second, PROMPTS[0], turn)
    assert set(turn.versions.tolist()) == {old + 1}


def test_samples_go_on_with_the_new_weights(served, endless):
    old = served.engine.version()
    generating = endless(served.engine, samples=3)
    served.update(served.second, old + 1)
    for turn in generating.result(60)[0]:
        versions = fetch(turn.versions).tolist()
        assert versions == sorted(versions)
        assert set(versions) == {old, old + 1}


def test_an_update_fences_the_engine(served, asked):
    new = served.engine.version() + 1
    served.engine.begin_update(new, served.second.names)
    generating = asked(served.engine).ask(Request(PROMPTS[0], GREEDY))
    for bucket in served.second.buckets:
        served.write(served.second, bucket)
    time.sleep(0.2)
    assert not generating.done()
    served.engine.commit_update(new)
    ((turn,),) = generating.result(60)
    assert_of(served.second, PROMPTS[0], turn)


def test_an_update_that_failed_is_begun_anew(served):
    new, weights = served.engine.version() + 1, served.second
    served.engine.begin_update(new, weights.names)
    served.write(weights, weights.buckets[0])
    with pytest.raises(UpdateError, match="tensors were not written"):
        served.engine.commit_update(new)
    with pytest.raises(UpdateError, match="begin it again"):
        served.engine.commit_update(new)
    served.update(weights, new)
    assert_of(weights, PROMPTS[0], served.greedy(PROMPTS[0]))


def test_a_tensor_that_the_loader_would_skip_is_refused(served):
    new, weights = served.engine.version() + 1, Weights(served.folders[1])
    entry = weights.buckets[0].entries[0]
    surplus = type(entry)("model.surplus.weight", entry.dtype, entry.shape, entry.offset_bytes)
    served.engine.begin_update(new, [*weights.names, surplus.name])
    with pytest.raises(UpdateError, match=r"SGLang's loader skips model\.surplus\.weight"):
        served.engine.write(type(weights.buckets[0])(0, (surplus,)))
    served.update(weights, new)


def test_an_abort_returns_what_there_is_and_what_was_not_begun(served, asked, endless):
    generating = endless(served.engine, samples=2)
    served.engine.pause("keep")
    waiting = asked(served.engine).ask(Request(PROMPTS[0], GREEDY))
    served.engine.pause("abort")
    for turn in generating.result(60)[0]:
        assert turn.finish_reason == "abort"
        assert 0 < len(turn.token_ids) < 450
    ((turn,),) = waiting.result(60)
    assert len(turn.token_ids) == 0
    served.engine.resume()
    assert_of(served.first, PROMPTS[0], served.greedy(PROMPTS[0]))


def test_an_abort_while_weights_change_comes_back(served, endless):
    generating = endless(served.engine)
    new = served.engine.version() + 1
    served.engine.begin_update(new, served.second.names)
    served.engine.pause("abort")
    ((turn,),) = generating.result(60)
    assert turn.finish_reason == "abort"
    assert 0 < len(turn.token_ids) < 450
    served.engine.resume()
    served.update(served.first, new)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, -1, 1.0), (0.7, -1, 0.6), (0.7, 6, 0.6)])
def test_log_probs_are_those_of_the_distribution_that_is_sampled_from(served, temperature, top_k, top_p):
    sampling = SamplingParameters(
        samples=3, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=8, seed=1, stop_token_ids=()
    )
    (turns,) = served.engine.generate([Request(PROMPTS[0], sampling)])
    tensors = load_file(served.folders[0] / "model.safetensors")
    for turn in turns:
        before = torch.tensor([PROMPTS[0][-1], *turn.token_ids.tolist()[:-1]])
        logits = tensors["model.embed_tokens.weight"][before] @ tensors["lm_head.weight"].T
        expected = kept_log_probs(logits, sampling).gather(1, torch.from_numpy(turn.token_ids).long()[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(turn.log_probs), expected, atol=1e-4, rtol=0)


def test_log_probs_are_those_after_top_k(served):
    sampling = SamplingParameters(top_k=1, max_tokens=8, seed=1)
    ((turn,),) = served.engine.generate([Request(PROMPTS[0], sampling)])
    assert turn.token_ids.tolist() == expected(served.first, PROMPTS[0], 8)[0]
    assert turn.log_probs.tolist() == [0.0] * len(turn.token_ids)


def test_a_stream_gives_the_tokens_as_they_come(served):
    request = Request(PROMPTS[0], SamplingParameters(temperature=0, max_tokens=16))
    pieces = list(served.engine.generate_stream(request))
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece] == expected(served.first, PROMPTS[0])[0]


def test_requests_that_cannot_be_served(served):
    for sampling, prompt, words in (
        (SamplingParameters(max_tokens=LIMIT - 2), PROMPTS[1], "3 tokens and 510 new ones do not fit the engine's 512"),
        (SamplingParameters(samples=0), PROMPTS[1], "0 samples"),
        (SamplingParameters(top_p=1.5), PROMPTS[1], "top_p"),
        (SamplingParameters(), [], "prompt of 0 tokens"),
        (SamplingParameters(max_tokens=9), [10**6], "outside of the model's vocabulary"),
    ):
        with pytest.raises(UserError, match=words):
            served.engine.generate([Request(prompt, sampling)])


def test_weights_that_are_no_numbers_end_the_engine(fresh, endless):
    weights = fresh.second
    weights.tensors["lm_head.weight"] = torch.full_like(weights.tensors["lm_head.weight"], torch.nan)
    waiting = endless(fresh.engine)
    fresh.update(weights, 1)
    with pytest.raises(EngineDiedError, match="log-probabilities"):
        waiting.result(60)
    with pytest.raises(EngineDiedError, match="log-probabilities"):
        fresh.engine.version()


def test_a_killed_server_is_noticed_and_leaves_nothing(start, folders, endless):
    fresh = Served(start(load_format="dummy"), folders)
    assert fresh.engine.version() == -1
    with pytest.raises(UpdateError, match="dummy weights"):
        fresh.greedy(PROMPTS[0])
    fresh.update(fresh.first, 1)
    server = fresh.engine._server
    family = [psutil.Process(server._process.pid), *psutil.Process(server._process.pid).children(recursive=True)]
    waiting = endless(fresh.engine)
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SGLang engine"):
        waiting.result(60)
    with pytest.raises(EngineDiedError, match="SGLang engine has died"):
        fresh.engine.generate([Request(PROMPTS[0], SamplingParameters())])
    segment = Path("/dev/shm", f"sglang_stand_in_{server._process.pid}")
    assert segment.exists()
    fresh.engine.close()
    assert psutil.wait_procs(family, timeout=120)[1] == []
    assert not server._folder.exists()
    assert not segment.exists()


def told_until_killed(engine, tokens):
    """News of an engine whose server is killed after so many tokens, and those that were on their way by then."""
    told, killed = 0, False
    for events in engine.events():
        news = [event for event in events if isinstance(event, Progress)]
        yield from news
        told += sum(len(event.token_ids) for event in news)
        if told >= tokens and not killed:
            os.kill(engine._server._process.pid, signal.SIGKILL)
            killed = True


def test_a_killed_server_has_told_of_its_tokens(start, folders, long_prompt):
    fresh, partials = Served(start(), folders), ProgressLog()
    sampling = SamplingParameters(samples=2, temperature=0, max_tokens=450)
    fresh.engine.submit({7: Request(long_prompt, sampling)})
    with pytest.raises(EngineDiedError, match="SGLang engine died"):
        # The first token of each sample and 64 more.
        list(map(partials.add, told_until_killed(fresh.engine, 130)))
    fresh.engine.close()
    begun = partials.of([7])[7]
    token_ids, log_probs = expected(fresh.first, long_prompt, 450)
    for each in (begun[0], begun[1]):
        count = len(each.token_ids)
        assert 65 <= count < 450
        assert each.token_ids.tolist() == token_ids[:count]
        assert each.log_probs.tolist() == pytest.approx(log_probs[:count], abs=1e-5)
        assert each.versions.tolist() == [0] * count


def test_the_tokens_of_a_sample_that_has_ended_are_not_told_of_as_of_one_that_goes_on(start, folders, long_prompt):
    fresh, partials = Served(start(), folders), ProgressLog()
    begun = {0: expected(fresh.first, long_prompt, 449)[0], 1: []}
    sampling = SamplingParameters(samples=2, temperature=0, max_tokens=450)
    fresh.engine.submit({7: Request(long_prompt, sampling, begun=begun)})
    with pytest.raises(EngineDiedError, match="SGLang engine died"):
        list(map(partials.add, told_until_killed(fresh.engine, 65)))
    fresh.engine.close()
    # The first sample has ended with its one token.
    assert list(partials.of([7])[7]) == [1]


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (f"printf 'one sentence' > \"$3/{REFUSED}\"; exit 2", UserError, "^one sentence$"),
        # No bad input: it may start another time.
        ("exit 3", RuntimeError, "ended with exit code 3 before it served"),
        ("kill -KILL $$", RuntimeError, "ended with exit code -9 before it served"),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch, folders, program, error, message):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setenv(installation.PYTHON_VARIABLE, str(python))
    engine = SglangEngine(folders[0], USUAL)
    with pytest.raises(error, match=message):
        engine.start()
    engine.close()


def test_a_server_may_take_as_long_as_the_run_lets_it(start, monkeypatch):
    """An hour passes each time somebody looks at a clock."""
    clock = SimpleNamespace(sleep=time.sleep, monotonic=itertools.count(step=3600).__next__)
    monkeypatch.setattr("megarl.rollout.sglang.process.time", clock)
    assert start().version() == 0


def test_scales_that_sglang_packed_are_loaded_no_more():
    model = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(128, 128), "norm": torch.nn.LayerNorm(128)})
    tracing.check_loadable(model)
    # Marked as SGLang 0.5.23 marks them in `requant_block_scale_ue8m0_for_deepgemm`.
    model["qkv_proj"].weight.format_ue8m0 = True
    with pytest.raises(
        UpdateError, match=r"packed the scales of qkv_proj for DeepGEMM .*=triton, and moe_runner_backend"
    ):
        tracing.check_loadable(model)


def test_parameters_that_no_checkpoint_brings_are_not_expected_of_a_refit():
    model = torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2)})
    # Marked as SGLang 0.5.23 marks the scales of keys and values in `BaseKVCacheMethod.create_weights`.
    model["attn"].bias._skip_weight_check = True
    assert list(tracing.loaded_parameters(model)) == ["attn.weight"]


@pytest.fixture
def ending(request):
    """An engine over a server of either kind, which may end: others start another one."""
    if request.param == "stand-in":
        yield request.getfixturevalue("fresh").engine
    else:
        yield request.getfixturevalue("sglang_served").engine
        request.getfixturevalue("sglang_engines").close()


@pytest.mark.parametrize("ending", SERVERS, indirect=True)
def test_a_server_ends_that_is_to_resume_memory_which_it_holds(ending):
    server = ending._server
    server.client.post("/release_memory_occupation", tags=["weights"])
    server.client.post("/resume_memory_occupation", tags=["weights"])
    with pytest.raises(ServerGoneError):
        server.client.post("/resume_memory_occupation", tags=["weights"])
    server.wait()
    with pytest.raises(EngineDiedError, match="SGLang engine"):
        ending.version()
