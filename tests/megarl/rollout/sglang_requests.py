"""Requests to SGLang's server, past the engine, and states in which its rules show."""

import time
from contextlib import contextmanager

from eventually import eventually

PROMPT = [10, 20, 30, 40, 50]


def ask(client, tokens=12, seeds=(1,), prompt=PROMPT, adapter=None, priority=0, **sampling):
    """A call of /generate that has begun."""
    shared = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": tokens, "stop_token_ids": [], **sampling}
    body = {
        "input_ids": [prompt] * len(seeds),
        "sampling_params": [{**shared, "sampling_seed": seed, "ignore_eos": True} for seed in seeds],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "return_sampling_mask": shared["top_k"] > 0,
        "return_routed_experts": True,
        "lora_path": adapter,
        "priority": priority,
    }
    return client.begin(client.ask("/generate", body))


def tokens_of(asked):
    return [answer["output_ids"] for answer in asked.result(60)]


def versions_of(answer):
    spans = answer["meta_info"]["weight_versions"]
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


@contextmanager
def paused(client, mode):
    client.post("/pause_generation", mode=mode)
    try:
        yield
    finally:
        client.post("/continue_generation", torch_empty_cache=False)


def running(client, tokens=400):
    """A sample that is being computed."""
    asked = ask(client, tokens=tokens)
    time.sleep(0.4)
    assert not asked.done()
    return asked


def stream(client, tokens, interval, seeds=(1, 2), heard=None, priority=0):
    """A call of /generate that has begun, whose answers go to `heard`, too, as they come."""
    shared = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": tokens, "stop_token_ids": []}
    body = {
        "input_ids": [PROMPT] * len(seeds),
        "sampling_params": [
            {**shared, "sampling_seed": seed, "stream_interval": interval, "ignore_eos": True} for seed in seeds
        ],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
        "return_sampling_mask": False,
        "return_routed_experts": True,
        "priority": priority,
    }
    heard = [] if heard is None else heard

    async def listen():
        async for answer in client.answers("/generate", body):
            heard.append(answer)
        return heard

    return client.begin(listen())


def without_room(client):
    """A call that takes all the room for samples, all of which have begun; and how many there are."""
    heard, most = [], client.get("/server_info")["max_running_requests"]
    asked = stream(client, tokens=200, interval=64, seeds=range(most), heard=heard, priority=50)
    assert eventually(lambda: len({answer["index"] for answer in heard}) == most)
    return asked, most
