"""A server with the rules of SGLang's that costs a second to start; a program: `sglang_stand_in.py FOLDER`.

It samples from a model that sees the last token alone: the logits are its row of `model.embed_tokens.weight` times
`lm_head.weight`. Each of its rules is checked against SGLang's own server, too (`sglang_rules.py`).
"""

import asyncio
import base64
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file
from sglang_adapters import Adapters, reference_to

from megarl.rollout.protocol import SamplingParameters
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sglang import hooks, worker
from megarl.rollout.sglang.calls import ARGUMENTS, LOAD_FORMAT
from megarl.rollout.sglang.parent import end_with_parent
from megarl.rollout.sglang.samples import NEUTRAL
from megarl.rollout.transformers.sampling import kept_log_probs

STEP_S = 0.002
SAMPLED = {
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "sampling_seed",
    "stream_interval",
}
"""Sampling parameters that it heeds."""
_TOLD_OF_TOKENS = {"output_token_logprobs", "output_token_sampling_logprobs", "output_token_sampling_mask"}
REFUSED_ONCE = "refused_once.txt"
"""A file in the model's folder with the path of a call that is refused, once."""
SCHEDULER = "sglang::scheduler"
"""The name of the process that steps, in SGLang; here one that is asked for the state of the server alone."""


class Model:
    """All tensors of a folder, by their names in it."""

    def __init__(self, folder):
        self._tensors = load_file(folder / "model.safetensors")
        self.config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))

    def named_parameters(self):
        return self._tensors.items()

    def parameters(self):
        return self._tensors.values()

    def buffers(self):
        return []

    def modules(self):
        return []

    def named_modules(self):
        return []

    def load_weights(self, tensors):
        for name, tensor in tensors:
            # As SGLang's models: what is not known is skipped, without an error.
            if name in self._tensors:
                self._tensors[name].copy_(tensor)

    def hidden(self, token):
        return self._tensors["model.embed_tokens.weight"][token]

    def logits(self, hidden):
        return hidden @ self._tensors["lm_head.weight"].T


class Sample:
    def __init__(self, prompt, sampling, limit, asked, sizes=()):
        self.prompt, self.sampling, self.asked, self.sizes = prompt, sampling, asked, sizes
        self.most = max(0, min(sampling["max_new_tokens"], limit - len(prompt) - 1))
        self.token_ids, self.log_probs, self.kept_log_probs, self.versions = [], [], [], []
        self.reason = None
        self.told = 0

    def step(self, model, adapters, version, ends):
        hidden = model.hidden((self.prompt + self.token_ids)[-1])
        if (adapter := self.asked.get("lora_path")) is not None:
            hidden = adapters.adapted(adapter, hidden)
        logits = model.logits(hidden).double()
        greedy = self.sampling["temperature"] == 0
        log_probs = (logits if greedy else logits / self.sampling["temperature"]).log_softmax(-1)
        kept = log_probs
        if self.asked["return_sampling_mask"]:
            kept = kept_log_probs(log_probs[None], SamplingParameters(**self._cut()))[0]
        noise = np.random.default_rng((self.sampling["sampling_seed"], len(self.prompt) + len(self.token_ids)))
        gumbel = 0 if greedy else torch.from_numpy(noise.gumbel(size=len(kept)))
        token = int((kept + gumbel).argmax())
        self.token_ids.append(token)
        self.log_probs.append(float(log_probs[token]))
        self.kept_log_probs.append(float(kept[token]))
        self.versions.append(version)
        if (token in ends and not self.sampling.get("ignore_eos")) or token in self.sampling["stop_token_ids"]:
            self.reason = "stop"
        elif len(self.token_ids) >= self.most:
            self.reason = "length"

    def _cut(self):
        return {name: self.sampling[name] for name in ("top_k", "top_p")}

    def experts(self):
        """[all tokens but the last, layers, top-k]: those that follow the token."""
        layers, topk, experts = self.sizes
        fed = np.array((self.prompt + self.token_ids)[:-1], dtype=np.int32)
        return (fed[:, None, None] + np.arange(layers)[:, None] + np.arange(topk)).astype(np.int32) % experts

    def news(self):
        """An answer with what was not told of yet; None if it is not time to tell, by the rules of such a stream."""
        new = len(self.token_ids) - self.told
        if not self.reason and new < self.sampling["stream_interval"] and (self.told or not new):
            return None
        answer = self.answer()
        about = answer["meta_info"]
        for key in about.keys() & _TOLD_OF_TOKENS:
            about[key] = about[key][self.told :]
        answer["output_ids"] = self.token_ids[self.told :]
        self.told = len(self.token_ids)
        return answer

    def waiting_aborted(self):
        """The last answer of a sample that ends as it waits: the last token told again, and all log-probs."""
        for values in (self.token_ids, self.log_probs, self.kept_log_probs, self.versions):
            del values[self.told :]
        answer = self.answer()
        answer["output_ids"] = self.token_ids[-1:]
        return answer

    def answer(self):
        spans = []
        for place, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"version": version, "start": place, "end": place + 1})
        about = {
            "completion_tokens": len(self.token_ids),
            "finish_reason": {"type": self.reason} if self.reason else None,
            "weight_versions": spans,
            # JSON has no NaN.
            "output_token_logprobs": [
                [log_prob if np.isfinite(log_prob) else None, token, None]
                for log_prob, token in zip(self.log_probs, self.token_ids, strict=True)
            ],
        }
        if self.asked["return_sampling_mask"]:
            about["output_token_sampling_logprobs"] = self.kept_log_probs
            about["output_token_sampling_mask"] = [[token] for token in self.token_ids]
        if self.asked.get("return_routed_experts") and self.sizes and self.reason:
            about["routed_experts"] = base64.b64encode(self.experts().tobytes()).decode()
        return {"output_ids": self.token_ids, "meta_info": about}


class RefusedError(Exception):
    """A call that SGLang answers with status 400."""


class StandIn:
    def __init__(self, arguments):
        self._arguments = arguments
        folder = Path(arguments["model_path"])
        self._refused = folder / REFUSED_ONCE
        config = json.loads((folder / "config.json").read_text())
        self._ends = ends_of(folder, config)
        # Without the argument the server takes a request for experts, and tells of none.
        self._sizes = ()
        if arguments.get("enable_return_routed_experts"):
            self._sizes = ReturnedExperts.of(folder).routing
        self._model = Model(folder)
        self._adapters = Adapters(config, arguments) if arguments.get("enable_lora") else None
        self._runner = SimpleNamespace(
            model=self._model, weight_updater=SimpleNamespace(tp_rank=0), lora_manager=self._adapters
        )
        self._version = arguments["weight_version"]
        self._limit = min(arguments.get("context_length", 2048), arguments["max_total_tokens"]) - 1
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._is_retracted = False
        self._in_session = False
        self._released = set()
        self._running = set()
        self._scheduler = None
        self._scheduler_asked = asyncio.Lock()

    def app(self):
        app = web.Application(middlewares=[self._guard], client_max_size=2**30)
        app.router.add_get("/model_info", self._reply(lambda: {"weight_version": self._version}))
        app.router.add_get("/server_info", self._about)
        app.on_startup.append(self._start_scheduler)
        for path in ("pause_generation", "continue_generation", "abort_request", "flush_cache", "begin_weight_update"):
            app.router.add_post(f"/{path}", self._reply(getattr(self, f"_{path}")))
        for path in ("release_memory_occupation", "resume_memory_occupation"):
            app.router.add_post(f"/{path}", self._reply(getattr(self, f"_{path}")))
        for path in ("end_weight_update", "update_weights_from_tensor", "update_weight_version"):
            app.router.add_post(f"/{path}", self._reply(getattr(self, f"_{path}")))
        app.router.add_post("/load_lora_adapter_from_tensors", self._reply(self._load_adapter))
        app.router.add_post("/generate", self._generate)
        return app

    def _reply(self, action):
        async def reply(request):
            body = await request.json() if request.can_read_body else {}
            return web.json_response(action(**body) or {"success": True})

        return reply

    @web.middleware
    async def _guard(self, request, handler):
        if request.headers.get("Authorization") != f"Bearer {self._arguments['api_key']}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            if self._refused.exists() and self._refused.read_text() == request.path:
                self._refused.unlink()
                raise RefusedError("not this time")
            return await handler(request)
        except RefusedError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)

    async def _start_scheduler(self, _app):
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        # It ends with the pipe, and so with the server.
        self._scheduler = await asyncio.create_subprocess_exec(SCHEDULER, executable="/bin/cat", **pipes)

    async def _about(self, _request):
        async with self._scheduler_asked:
            self._scheduler.stdin.write(b"\n")
            await self._scheduler.stdout.readline()
        return web.json_response({"max_req_input_len": self._limit - 5})

    def _pause_generation(self, mode):
        self._goes_on.clear()
        self._is_retracted = self._is_retracted or mode == "retract"

    def _continue_generation(self, torch_empty_cache):
        self._is_retracted = False
        self._goes_on.set()

    def _abort_request(self, abort_all):
        for sample in self._running:
            # One that is paused in its place ends with its next step.
            sample.reason = "abort"

    def _flush_cache(self):
        if self._running and not self._is_retracted:
            raise RefusedError("Flush cache failed.")

    def _release_memory_occupation(self, tags):
        # torch_memory_saver, which SGLang has on GPUs alone: "Cannot pause allocation that is not active.", exit(1).
        if self._released.intersection(tags):
            os._exit(1)
        self._released.update(tags)

    def _resume_memory_occupation(self, tags):
        if not self._released.issuperset(tags):
            os._exit(1)
        self._released.difference_update(tags)

    def _begin_weight_update(self):
        if self._in_session:
            raise RefusedError("a weight-update session is already open; call end_weight_update() first")
        self._in_session = True

    def _end_weight_update(self):
        if not self._in_session:
            raise RefusedError("no weight-update session is open; call begin_weight_update() first")
        self._in_session = False

    def _update_weights_from_tensor(self, serialized_named_tensors, load_format, flush_cache):
        if not self._in_session:
            raise RefusedError(
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        assert load_format == LOAD_FORMAT
        worker.answer(self._runner)

    def _update_weight_version(self, new_version, abort_all_requests):
        self._version = new_version

    def _load_adapter(self, lora_name, config_dict, serialized_named_tensors):
        if self._adapters is None:
            raise RefusedError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        (tensors,) = (pickle.loads(base64.b64decode(each)) for each in serialized_named_tensors)
        done = self._adapters.load_lora_adapter_from_tensors(reference_to(lora_name), tensors, config_dict)
        if not done.success:
            raise RefusedError(done.error_message)

    def _check_adapter(self, name):
        if name is not None and self._adapters is None:
            raise RefusedError(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")
        if name is not None and self._adapters.number_of(name) is None:
            raise RefusedError(f"Got LoRA adapter that has never been loaded: {name}")

    async def _generate(self, request):
        asked = await request.json()
        self._check_adapter(asked.get("lora_path"))
        await self._goes_on.wait()
        prompts, samplings = asked["input_ids"], asked["sampling_params"]
        if isinstance(samplings, dict):
            prompts, samplings = [prompts], [samplings]
        samples = [Sample(*each, self._limit, asked, self._sizes) for each in zip(prompts, samplings, strict=True)]
        for sample in samples:
            if len(sample.prompt) > self._limit:
                raise RefusedError(f"The input ({len(sample.prompt)} tokens) is longer than the model's context length")
            if len(sample.prompt) + sample.sampling["max_new_tokens"] > self._limit + 1:
                raise RefusedError("Requested token count exceeds the model's maximum context length")
            if len(sample.prompt) >= self._limit - 5:
                raise RefusedError(f"Input length ({len(sample.prompt)} tokens) exceeds the maximum allowed length")
            if not 0 < sample.sampling["top_p"] <= 1:
                raise RefusedError(f"top_p must be in (0, 1], got {sample.sampling['top_p']}.")
            check_neutral(sample.sampling)
        self._running.update(samples)
        if asked["stream"]:
            return await self._stream(request, samples)
        await asyncio.gather(*(self._serve(sample) for sample in samples))
        return web.json_response([sample.answer() for sample in samples])

    async def _stream(self, request, samples):
        assert self._arguments["incremental_streaming_output"]
        response = web.StreamResponse()
        await response.prepare(request)

        async def tell(answer, index):
            if answer is not None:
                await response.write(b"data: " + json.dumps({**answer, "index": index}).encode() + b"\n\n")

        async def serve(index, sample):
            await self._serve(sample, lambda: tell(sample.news(), index))
            if sample.reason == "abort":
                await tell(sample.waiting_aborted() if self._is_retracted else sample.news(), index)

        await asyncio.gather(*(serve(*each) for each in enumerate(samples)))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _serve(self, sample, tell=None):
        try:
            while sample.reason is None:
                await asyncio.sleep(STEP_S)
                while not self._goes_on.is_set() and not (sample.reason and self._is_retracted):
                    await asyncio.sleep(STEP_S)
                if sample.reason is None:
                    sample.step(self._model, self._adapters, self._version, self._ends)
                    if tell is not None:
                        await tell()
        finally:
            self._running.discard(sample)


def ends_of(folder, config):
    written = folder / "generation_config.json"
    ends = (json.loads(written.read_text()) if written.exists() else config).get("eos_token_id")
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def check_neutral(sampling):
    """SGLang would heed them, and this one does not."""
    unknown = {name: value for name, value in sampling.items() if name not in SAMPLED}
    assert unknown == {name: NEUTRAL[name] for name in unknown}


def leave_a_segment():
    """As SGLang does, which says its name and removes it never."""
    segment = Path("/dev/shm", f"sglang_stand_in_{os.getpid()}")
    hooks.let_segment_go(str(segment))
    segment.touch()


def main():
    end_with_parent()
    folder = Path(sys.argv[1])
    arguments = json.loads((folder / ARGUMENTS).read_text())
    leave_a_segment()

    async def app():
        return StandIn(arguments).app()

    web.run_app(
        app(),
        host=arguments["host"],
        port=arguments["port"],
        print=None,
        handle_signals=False,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
