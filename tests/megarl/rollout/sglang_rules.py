"""Rules of SGLang's server that the engine relies on, each as a check of a running engine."""

import base64
import pickle
import time
from contextlib import contextmanager

import aiohttp
import psutil
import pytest
import torch
from eventually import eventually
from sglang_requests import PROMPT, ask, paused, running, stream, tokens_of, versions_of, without_room
from sglang_stand_in import SCHEDULER

from converters.formats.safetensors import CONFIG, read_json
from megarl.rollout.sglang.calls import LOAD_FORMAT
from megarl.rollout.sglang.client import CallRefusedError, Client
from megarl.rollout.sglang.samples import ADAPTER

RULES = {}
RULES_OF_SLOTS = {}
"""Rules of a server that has a slot for an adapter, and the engine's name for it."""


def rule(check):
    RULES[check.__name__] = lambda engine: check(engine._server.client)
    return check


def rule_of_slots(check):
    RULES_OF_SLOTS[check.__name__] = lambda engine: check(engine._server.client)
    return check


def rule_of_workers(check):
    RULES[check.__name__] = check
    return check


@contextmanager
def refused(words):
    with pytest.raises(CallRefusedError, match=words):
        yield


@rule
def who_has_not_the_key_is_refused(client):
    stranger = Client(client._url, "wrong")
    try:
        with refused("401"):
            stranger.get("/server_info")
    finally:
        stranger.close()


@rule
def weights_come_in_a_session_alone(client):
    with refused("must run between"):
        client.post(
            "/update_weights_from_tensor", serialized_named_tensors=[], load_format=LOAD_FORMAT, flush_cache=False
        )
    with refused("no weight-update session is open"):
        client.post("/end_weight_update")
    client.post("/begin_weight_update")
    with refused("already open"):
        client.post("/begin_weight_update")
    client.post("/end_weight_update")


@rule
def a_seed_says_what_is_sampled(client):
    first, other = tokens_of(ask(client, seeds=(1, 2)))
    assert first != other
    assert tokens_of(ask(client, seeds=(3, 1, 4)))[1] == first
    assert tokens_of(ask(client, seeds=(1,))) == [first]


@rule
def a_draw_follows_seed_and_place(client):
    (whole,) = tokens_of(ask(client, seeds=(5,)))
    # From the same place on, with the same seed, whatever of it was sampled and whatever was given.
    assert tokens_of(ask(client, seeds=(5,), prompt=[*PROMPT, *whole[:5]], tokens=7)) == [whole[5:]]
    # One place later every draw is another.
    (later,) = tokens_of(ask(client, seeds=(5,), prompt=[PROMPT[0], *PROMPT]))
    assert later != whole


@contextmanager
def stopped_scheduler(engine):
    """The process that steps stands still, and others of the server do not."""
    family = psutil.Process(engine._server._process.pid).children(recursive=True)
    (scheduler,) = [each for each in family if SCHEDULER in each.cmdline()[0]]
    scheduler.suspend()
    try:
        yield
    finally:
        scheduler.resume()


@rule_of_workers
def a_scheduler_that_stands_still_does_not_say_how_it_is(engine):
    client = engine._server.client
    with stopped_scheduler(engine):
        asked = client.begin(client._ask("GET", "/server_info", None))
        client.get("/model_info")
        time.sleep(1)
        assert not asked.done()
    assert asked.result(60)
    # It does whatever else stands still.
    client.post("/begin_weight_update")
    for mode in ("in_place", "retract"):
        with paused(client, mode):
            assert client.get("/server_info")
    client.post("/end_weight_update")


@rule_of_workers
def weights_that_are_not_known_are_skipped_without_an_error(engine):
    known, unknown = "model.norm.weight", "model.surplus.weight"
    shape = (read_json(engine._model_path / CONFIG)["hidden_size"],)
    (packed,) = engine.trace_layout(
        dict.fromkeys((unknown, known), shape), dict.fromkeys((unknown, known), torch.float32)
    )
    trace = packed.unpacked()
    assert [placement.hf_name for placement in trace.shard.placements] == [known]
    assert (trace.untraced, trace.refused) == ({}, {})


@rule
def an_answer_has_a_log_prob_and_a_version_for_each_token(client):
    (answer,) = ask(client).result(60)
    assert len(answer["output_ids"]) == 12
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert len(versions_of(answer)) == 12
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@rule
def a_server_that_was_not_made_to_tell_of_experts_tells_of_none(client):
    (answer,) = ask(client).result(60)
    assert "routed_experts" not in answer["meta_info"]


@rule
def log_probs_after_top_k_come_beside_those_before(client):
    (answer,) = ask(client, top_k=3).result(60)
    after = answer["meta_info"]["output_token_sampling_logprobs"]
    before = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert len(after) == len(before) == 12
    assert all(one > other for one, other in zip(after, before, strict=True))


@rule
def one_of_the_tokens_that_are_kept_is_told_of_with_each(client):
    (answer,) = ask(client, top_k=30).result(60)
    assert [len(kept) for kept in answer["meta_info"]["output_token_sampling_mask"]] == [1] * 12


@rule
def top_p_is_a_share_of_what_top_k_keeps(client):
    (answer,) = ask(client, top_k=2, top_p=0.5).result(60)
    # The likelier of two has half of what they have together, and not half of all.
    assert answer["meta_info"]["output_token_sampling_logprobs"] == [0.0] * 12
    assert all(entry[0] < -1 for entry in answer["meta_info"]["output_token_logprobs"])


@rule
def a_response_that_does_not_fit_is_cut_without_a_word(client):
    limit = client.get("/server_info")["max_req_input_len"]
    with refused("exceeds the maximum allowed length"):
        ask(client, tokens=1, prompt=[5] * limit).result(60)
    with refused("exceeds the model's maximum context length"):
        ask(client, tokens=8, prompt=[5] * (limit - 1)).result(60)
    (answer,) = ask(client, tokens=7, prompt=[5] * (limit - 1)).result(60)
    assert (len(answer["output_ids"]), answer["meta_info"]["finish_reason"]["type"]) == (5, "length")


@rule
def what_cannot_be_sampled_is_refused(client):
    with refused("longer than"):
        ask(client, prompt=[5] * 5000).result(60)
    with refused("top_p"):
        ask(client, top_p=1.5).result(60)


@rule
def a_request_to_a_server_that_is_paused_waits(client):
    with paused(client, "in_place"):
        asked = ask(client)
        time.sleep(0.4)
        assert not asked.done()
    assert len(tokens_of(asked)[0]) == 12


@rule
def a_pause_changes_no_token(client):
    expected = tokens_of(ask(client, tokens=400))
    asked = running(client)
    for mode in ("in_place", "retract"):
        with paused(client, mode):
            pass
        time.sleep(0.1)
    assert tokens_of(asked) == expected


@rule
def keys_and_values_are_forgotten_while_nothing_has_any(client):
    asked = running(client)
    with paused(client, "in_place"):
        with refused("flush_cache"):
            client.post("/flush_cache")
        client.post("/pause_generation", mode="retract")
        client.post("/flush_cache")
    assert len(tokens_of(asked)[0]) == 400


@rule
def tokens_after_a_new_version_are_of_it(client):
    old = client.get("/model_info")["weight_version"]
    asked = running(client)
    with paused(client, "retract"):
        client.post("/update_weight_version", new_version="77", abort_all_requests=False)
    (answer,) = asked.result(60)
    client.post("/update_weight_version", new_version=old, abort_all_requests=False)
    versions = versions_of(answer)
    switch = versions.index("77")
    assert 0 < switch < 400
    assert versions == [old] * switch + ["77"] * (400 - switch)


@rule
def an_aborted_sample_gives_what_it_has(client):
    asked = running(client)
    client.post("/abort_request", abort_all=True)
    (answer,) = asked.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(answer["output_ids"])
    assert 0 < count < 400
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(versions_of(answer)) == count


@rule
def an_aborted_sample_gives_what_it_told_of_while_nothing_is_computed(client):
    asked = running(client)
    with paused(client, "retract"):
        client.post("/abort_request", abort_all=True)
        (answer,) = asked.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"]) == len(versions_of(answer))


@rule
def a_sample_that_is_aborted_in_its_place_ends_with_its_next_step(client):
    asked = running(client)
    with paused(client, "in_place"):
        client.post("/abort_request", abort_all=True)
        time.sleep(0.4)
        assert not asked.done()
    (answer,) = asked.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 400


@rule
def a_stream_tells_of_what_is_new_with_log_probs_and_versions(client):
    expected = tokens_of(ask(client, tokens=20, seeds=(1, 2)))
    heard = stream(client, tokens=20, interval=8).result(60)
    for index in (0, 1):
        own = [answer for answer in heard if answer["index"] == index]
        assert [token for answer in own for token in answer["output_ids"]] == expected[index]
        # The first at once, and then every so many, unless the server was slow to send.
        assert 2 <= len(own) <= 4
        for before, answer in enumerate(own):
            total = sum(len(each["output_ids"]) for each in own[: before + 1])
            assert answer["meta_info"]["completion_tokens"] == len(versions_of(answer)) == total
            assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
            assert (answer["meta_info"]["finish_reason"] is None) == (answer is not own[-1])


@rule
def a_stream_that_is_aborted_as_it_waits_repeats_its_last_token(client):
    heard = []
    asked = stream(client, tokens=400, interval=1, seeds=(1,), heard=heard)
    assert eventually(lambda: len(heard) >= 3)
    with paused(client, "retract"):
        time.sleep(0.3)
        count, told = len(heard), sum(len(answer["output_ids"]) for answer in heard)
        client.post("/abort_request", abort_all=True)
        last = asked.result(60)[-1]
    assert len(heard) == count + 1
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == len(versions_of(last)) == told
    assert last["output_ids"] == heard[-2]["output_ids"][-1:]
    assert len(last["meta_info"]["output_token_logprobs"]) == told


@rule
def the_lowest_priority_begins_first_and_behind_what_has_begun(client):
    begun, most = without_room(client)
    ended = []
    with paused(client, "in_place"):
        # Each needs all the room, and so they end one after the other.
        asked = {each: ask(client, tokens=2, seeds=range(most), priority=each) for each in (90, 10, 40, 11)}
        for priority, answer in {50: begun, **asked}.items():
            answer.add_done_callback(lambda _, priority=priority: ended.append(priority))
    assert eventually(lambda: len(ended) == 5, 60)
    assert ended == [50, 10, 11, 40, 90]


@rule
def a_sample_without_room_that_is_aborted_ends_at_once(client):
    begun, _ = without_room(client)
    waiting = []
    without = stream(client, tokens=12, interval=1, seeds=(1,), heard=waiting)
    time.sleep(0.2)
    with paused(client, "in_place"):
        client.post("/abort_request", abort_all=True)
        (answer,) = without.result(60)
        assert not begun.done()
    assert (answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ([], 0)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert versions_of(answer) == answer["meta_info"]["output_token_logprobs"] == []
    begun.result(60)


@rule
def a_caller_that_goes_away_ends_its_request(client):
    asked = running(client)
    asked.cancel()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            client.post("/flush_cache")
            return
        except (CallRefusedError, aiohttp.ClientError):
            time.sleep(0.2)
    raise AssertionError("the server computes for nobody")


def load(client, name):
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["q_proj"]}
    tensors = [base64.b64encode(pickle.dumps({})).decode()]
    client.post("/load_lora_adapter_from_tensors", lora_name=name, config_dict=config, serialized_named_tensors=tensors)


@rule
def a_server_without_a_slot_takes_no_adapter(client):
    with refused("LoRA is not enabled"):
        load(client, ADAPTER)
    with refused("LoRA is not enabled"):
        ask(client, adapter=ADAPTER).result(60)


@rule_of_slots
def a_name_of_no_adapter_is_refused(client):
    with refused("never been loaded"):
        ask(client, adapter="other").result(60)


@rule_of_slots
def a_name_is_taken_once(client):
    with refused("already loaded"):
        load(client, ADAPTER)
    assert len(tokens_of(ask(client, adapter=ADAPTER))[0]) == 12
