"""SGLang as an engine: implements the engine's protocols as a client of its server."""

import base64
import pickle
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from converters.formats.safetensors import CONFIG, read_json
from megarl.data import Turn
from megarl.resharding.loader.buckets import Bucket
from megarl.rollout.engine_of_workers import EngineOfWorkers
from megarl.rollout.owned_engine import by_owner
from megarl.rollout.protocol import EngineDiedError, EngineMemory, Request, UpdateError
from megarl.rollout.request_in_flight import Answer, Listener, SampleInFlight
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.sglang.adapter_arguments import ADAPTER_SLOT
from megarl.rollout.sglang.arguments import adapter_config
from megarl.rollout.sglang.calls import LOAD_FORMAT
from megarl.rollout.sglang.client import ServerGoneError
from megarl.rollout.sglang.in_flight import InFlight
from megarl.rollout.sglang.kind import SGLANG
from megarl.rollout.sglang.process import Server
from megarl.rollout.sglang.samples import ADAPTER, Limits
from megarl.rollout.worker_memory import require
from megatron_ext import device

_NOTHING = base64.b64encode(pickle.dumps([])).decode()
"""An update without tensors, as the server reads it."""
_NO_ADAPTER = base64.b64encode(pickle.dumps({})).decode()
"""An adapter of zeros, as the server reads it."""
_RETURNS_EXPERTS = "enable_return_routed_experts"
_POLL_S = 0.1
_ABORT_S = 10.0


class SglangEngine(EngineOfWorkers):
    """See `megarl.rollout.protocol.Engine`. `engine_args` are fields of SGLang's ServerArgs by their own names.

    The server steps by itself. It can be held in two ways: `in_place`, after which requests resume as they were, or
    `retract`, which drops the KV cache of requests, so that they are recomputed from the first token. Weights change
    only under `retract`.
    """

    title = "SGLang"

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        super().__init__(model_path, engine_args)
        self._server: Server | None = None
        self._in_flight: InFlight
        self._held: Literal["in_place", "retract"] | None = None
        self._in_session = False
        """Whether the server expects weights."""
        self._has_slot = bool(self._engine_args.get(ADAPTER_SLOT))
        self._is_ending = False

    @by_owner
    def start(self) -> None:
        """See `Sampler.start`."""
        self._server = Server(self._model_path, self._engine_args)
        try:
            about = self._server.start()
            if self._has_slot:
                self._take_slot()
        except BaseException:
            self._end_server()
            raise
        vocabulary = read_json(self._model_path / CONFIG)["vocab_size"]
        returned = ReturnedExperts.of(self._model_path) if self._engine_args.get(_RETURNS_EXPERTS) else None
        limits = Limits(about["max_req_input_len"], vocabulary, returned, self._has_slot)
        self._in_flight = InFlight(self._server.client, limits, self._fails, self._report_progress)
        self._version = self._server.first_version
        threading.Thread(target=self._watch, args=(self._server,), name="SGLang server", daemon=True).start()

    def version(self) -> int:
        """See `Sampler.version`.

        Returns only once the server's scheduler has answered, too: HTTP keeps working without it.
        """
        version, server = super().version(), self._server
        # Not in the owner thread, where a busy scheduler would block all other calls.
        if server is not None:
            try:
                server.client.get("/server_info")
            except ServerGoneError as error:
                self._fails(error)
                raise EngineDiedError(str(error)) from error
        return version

    @by_owner
    def worker_parts(self) -> list[int]:
        """See `LayoutSource.worker_parts`."""
        return [0] * self._worker_count()

    @by_owner
    def sleep(self) -> None:
        """See `Sleeper.sleep`."""
        self._pause_stepping()
        self._abort()
        if device.backend() == "gloo":
            self._workers("sleep")
        # A GPU server that is told to release memory twice exits.
        elif held := [part for part in get_args(EngineMemory) if part not in self._away]:
            if "kv_cache" in held:
                self._reset_kv_cache()
            self._post("/release_memory_occupation", tags=held)
        self._away = frozenset(get_args(EngineMemory))
        self._resume_stepping()

    @by_owner
    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Sleeper.wake_up`."""
        if wanted := sorted(self._away.intersection(parts)):
            if device.backend() == "gloo":
                self._workers("wake_up", wanted)
            else:
                self._post("/resume_memory_occupation", tags=wanted)
            self._away -= frozenset(wanted)
            if "kv_cache" in wanted:
                self._reset_kv_cache()

    # The methods below, too, run in the owner thread, but for `_watch` and `_fails`.

    def _accept(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        return self._in_flight.add(requests, listener)

    def _samples(self) -> Iterable[SampleInFlight]:
        return self._in_flight.samples()

    def _pause_stepping(self) -> None:
        if self._held is None:
            self._pause("in_place")
            self._in_flight.hold()

    def _fence(self) -> None:
        self._pause_stepping()
        self._retract()
        self._post("/begin_weight_update")
        self._in_session = True

    def _resume_stepping(self) -> None:
        if self._held and not self._paused and self._update is None:
            self._continue()
            self._in_flight.release()

    def _abort(self) -> None:
        self._in_flight.abort_waiting()
        deadline = time.monotonic() + _ABORT_S
        # A running sample reports its tokens with the next step. While weights change there is none, so samples end
        # with the tokens last reported.
        can_go_on = self._update is None and not self._away
        if can_go_on and self._in_flight.asked():
            self._continue()
        try:
            while self._in_flight.asked() and (can_go_on or time.monotonic() < deadline):
                self._post("/abort_request", abort_all=True)
                self._in_flight.wait(_POLL_S)
            self._in_flight.abort_asked()
        finally:
            if self._held is None:
                self._pause("in_place")

    def _abort_some(self, answers: Collection[Future[list[Turn]]]) -> None:
        self._in_flight.abort_waiting(answers)
        self._in_flight.abort_asked(answers)

    def _fail(self, error: EngineDiedError) -> None:
        if hasattr(self, "_in_flight"):
            self._in_flight.fail(error)

    def _reset_kv_cache(self) -> None:
        with self._stepping_paused():
            self._retract()
            self._post("/flush_cache")

    def _abandon_update(self) -> None:
        self._end_session()

    def _begin_loading(self) -> None:
        self._workers("forget_adapter" if self._has_slot else "begin_loading")

    def _load_weights(self, bucket: Bucket) -> None:
        if self._has_slot:
            self._workers("keep_bucket", bucket)
            return
        # A worker skips other workers' experts, so a tensor is unknown only if all workers skip it.
        skipped = [set(names) for names in self._workers("load_bucket", bucket)]
        if nowhere := set.intersection(*skipped):
            raise UpdateError(f"SGLang's loader skips {min(nowhere)}: give the engine the config.json of the policy")

    def _finish_loading(self) -> None:
        self._workers("fill_slot" if self._has_slot else "finish_loading")

    def _finish_update(self, version: int) -> None:
        self._end_session()
        self._post("/update_weight_version", new_version=str(version), abort_all_requests=False)

    def _close(self) -> None:
        if self._server is not None:
            if hasattr(self, "_in_flight"):
                self._in_flight.fail(self._closed())
            self._end_server()

    # Calls of the server.

    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("the SGLang engine was not started")
        return self._server

    def _post(self, path: str, **body: Any) -> Any:
        try:
            return self._running().client.post(path, **body)
        except ServerGoneError as error:
            raise EngineDiedError(str(error)) from error

    def _take_slot(self) -> None:
        """Register the adapter that requests name, with zero weights; no request is served with these.

        To unload an adapter, the server waits for all requests that name it, and forgets the name. So the name stays
        loaded, and the workers fill the slot.
        """
        config, tensors = adapter_config(self._engine_args), [_NO_ADAPTER] * self._worker_count()
        self._post(
            "/load_lora_adapter_from_tensors", lora_name=ADAPTER, config_dict=config, serialized_named_tensors=tensors
        )

    def _pause(self, mode: Literal["in_place", "retract"]) -> None:
        self._post("/pause_generation", mode=mode)
        self._held = mode

    def _retract(self) -> None:
        if self._held != "retract":
            self._pause("retract")

    def _continue(self) -> None:
        self._post("/continue_generation", torch_empty_cache=False)
        self._held = None

    def _end_session(self) -> None:
        if self._in_session:
            self._post("/end_weight_update")
            self._in_session = False

    def _worker_count(self) -> int:
        return SGLANG.workers(self._engine_args)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Open a session for weights on the server: the current update's, or else one without weights."""
        if self._in_session:
            yield
            return
        with self._stepping_paused():
            self._post("/begin_weight_update")
            self._in_session = True
            try:
                yield
            finally:
                self._end_session()

    @contextmanager
    def _stepping_paused(self) -> Iterator[None]:
        """Hold the server while the body runs; release it afterwards, even on an error, unless it was held before."""
        was_held = self._held
        self._pause_stepping()
        try:
            yield
        finally:
            if was_held is None:
                self._resume_stepping()

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        # SGLang reads weights at both ends of a session; on a GPU its processes crash if they are away.
        if device.backend() != "gloo":
            require(self._away, "weights")
        server, count = self._running(), self._worker_count()
        with self._session():
            server.calls.put_call(method, arguments)
            self._post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[_NOTHING] * count,
                load_format=LOAD_FORMAT,
                flush_cache=False,
            )
            return server.calls.take_answers(count)

    def _watch(self, server: Server) -> None:
        """Watch, in a thread of its own, for a server that exits unasked."""
        code = server.wait()
        if not self._is_ending:
            self._fails(RuntimeError(f"its server ended with exit code {code}"))

    def _fails(self, error: BaseException) -> None:
        """Let the engine die of an error seen outside the owner thread."""
        if not self._is_ending:
            self._owner.submit(self._die, error)

    def _end_server(self) -> None:
        if self._server is not None:
            self._is_ending = True
            self._server.close()
            self._server = None
