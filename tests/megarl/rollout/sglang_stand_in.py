"""A server with the rules of SGLang's that costs a second to start; a program: `sglang_stand_in.py FOLDER`.

It samples from a model that sees the last token alone: the logits are its row of `model.embed_tokens.weight` times
`lm_head.weight`. Each of its rules is checked against SGLang's own server, too (`sglang_rules.py`), but two that hold
on GPUs alone and were read. Memory that is released ends the server when it is to be released again: SGLang calls
`TorchMemorySaver::pause`, which ends its process (torch_memory_saver 0.0.9.post1, csrc/core.cpp, lines 115 to 121). And
so does a session for weights that begins or ends while these are released: at both ends SGLang reads some of them, as
`Fp8KVCacheMethod.process_weights_after_loading` does the scales of keys and values.
"""

import asyncio
import base64
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

from aiohttp import web
from sglang_adapters import Adapters, reference_to
from stand_in_samples import Model, Sample

from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sglang import hooks, worker
from megarl.rollout.sglang.calls import ARGUMENTS, LOAD_FORMAT
from megarl.rollout.sglang.parent import end_with_parent
from megarl.rollout.sglang.samples import NEUTRAL

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
REFUSED_ONCE = "refused_once.txt"
"""A file in the model's folder with the path of a call that is refused, once."""
SCHEDULER = "sglang::scheduler"
"""The name of the process that steps, in SGLang; here one that is asked for the state of the server alone."""


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
            model=self._model,
            weight_updater=SimpleNamespace(tp_rank=0),
            lora_manager=self._adapters,
            # It keeps no keys and values.
            token_to_kv_pool=None,
        )
        self._version = arguments["weight_version"]
        self._limit = min(arguments.get("context_length", 2048), arguments["max_total_tokens"]) - 1
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._in_session = False
        self._released = set()
        self._running = []
        self._waiting = []
        """Samples without room, and all that is retracted."""
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
        most = self._arguments["max_running_requests"]
        return web.json_response({"max_req_input_len": self._limit - 5, "max_running_requests": most})

    def _pause_generation(self, mode):
        self._goes_on.clear()
        if mode == "retract":
            self._waiting += self._running
            self._running = []

    def _continue_generation(self, torch_empty_cache):
        self._goes_on.set()

    def _abort_request(self, abort_all):
        # The one ends with its next step, the other at once.
        for sample in self._running:
            sample.is_aborted = True
        for sample in self._waiting:
            sample.reason = "abort"

    def _flush_cache(self):
        if self._running or (self._waiting and self._goes_on.is_set()):
            raise RefusedError("Flush cache failed.")

    def _release_memory_occupation(self, tags):
        if self._released.intersection(tags):
            os._exit(1)
        self._released.update(tags)

    def _resume_memory_occupation(self, tags):
        # `self.offload_tags.remove(tag)` raises in SGLang's scheduler.
        if not self._released.issuperset(tags):
            os._exit(1)
        self._released.difference_update(tags)

    def _begin_weight_update(self):
        if self._in_session:
            raise RefusedError("a weight-update session is already open; call end_weight_update() first")
        self._read_weights()
        self._in_session = True

    def _end_weight_update(self):
        if not self._in_session:
            raise RefusedError("no weight-update session is open; call begin_weight_update() first")
        self._read_weights()
        self._in_session = False

    def _read_weights(self):
        if "weights" in self._released:
            os._exit(1)

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
            if not sample.is_told:
                await tell(sample.waiting_aborted(), index)

        await asyncio.gather(*(serve(*each) for each in enumerate(samples)))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _serve(self, sample, tell=None):
        self._waiting.append(sample)
        try:
            while sample.reason is None:
                await asyncio.sleep(STEP_S)
                if self._goes_on.is_set():
                    self._let_in()
                    if sample in self._running:
                        sample.step(self._model, self._adapters, self._version, self._ends)
                        if tell is not None:
                            await tell()
        finally:
            for each in (self._running, self._waiting):
                if sample in each:
                    each.remove(sample)

    def _let_in(self):
        if self._arguments["enable_priority_scheduling"]:
            sign = 1 if self._arguments["schedule_low_priority_values_first"] else -1
            self._waiting.sort(key=lambda sample: sign * sample.asked["priority"])
        while self._waiting and len(self._running) < self._arguments["max_running_requests"]:
            self._running.append(self._waiting.pop(0))


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
