"""The core of a vLLM engine with data parallelism: one process per rank, kept in step by vLLM's coordinator."""

import asyncio
import pickle
from collections.abc import Coroutine, Sequence
from concurrent.futures import wait
from itertools import chain
from threading import Thread
from typing import Any, TypeVar

from megarl.rollout.protocol import EngineDiedError, EngineMemory, Load
from megarl.rollout.vllm.core import SampleOutput, SampleRequest
from megarl.rollout.vllm.processes import end_with_this_process, listen_where_asked
from megarl.rollout.vllm.ranks import Ranks

R = TypeVar("R")

_LOOK_AFTER_S = 1.0
"""How often a waiting call checks that all ranks are alive: vLLM does not fail calls that wait for a dead one."""


class DataParallelCore:
    """See `Core`. Uses the client of vLLM's AsyncLLM, with its event loop in a thread of its own."""

    def __init__(self, config: Any) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        async def start() -> Any:
            return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=False)

        end_with_this_process()
        listen_where_asked()
        self.processor = InputProcessor(config, renderer_from_config(config))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        try:
            self._client = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        self._processes = self._client.resources.engine_manager
        self._ranks = Ranks(len(self._client.core_engines))
        self._is_held = False

    def supported_tasks(self) -> Sequence[str]:
        """See `Core.supported_tasks`."""
        return self._wait(self._client.get_supported_tasks_async())

    def add(self, samples: Sequence[SampleRequest], conversation: int | None) -> None:
        """See `Core.add`. All samples go to one rank, which computes their prompt once."""
        self._ranks.place(samples, conversation)
        self._wait(self._add(samples))

    def abort(self, ids: Sequence[str]) -> None:
        """See `Core.abort`."""
        self._wait(self._client.abort_requests_async(list(ids)))
        self._ranks.end(ids)

    def step(self) -> list[SampleOutput]:
        """See `Core.step`."""
        return self._noted(self._wait(self._step()))

    def load(self) -> Load | None:
        """See `Core.load`; None, as only the ranks know it."""
        return None

    def hold(self) -> list[SampleOutput]:
        """See `Core.hold`."""
        self._is_held = True
        return self._noted(self._wait(self._hold()))

    def release(self) -> None:
        """See `Core.release`."""
        self._is_held = False
        self._wait(self._client.resume_scheduler_async())

    def forget(self) -> bool:
        """See `Core.forget`."""
        return self._wait(self._client.reset_prefix_cache_async(reset_running_requests=True))

    def sleep(self) -> None:
        """See `Core.sleep`."""
        # As `InProcessCore.sleep`. Once this returns, no rank steps.
        self._wait(self._client.sleep_async(1))

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Core.wake_up`."""
        is_awake = self._wait(self._client.wake_up_async(list(parts)))
        # With the last part awake, vLLM resumes by itself.
        if is_awake and self._is_held:
            self.hold()

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """See `Core.call_workers`; those of the first rank come first."""
        # Pickled, because vLLM's own encoding changes some types.
        call = pickle.dumps((method, arguments))
        calling = self._client.call_utility_all_async("collective_rpc", "call_pickled", None, (call,))
        return [pickle.loads(result) for result in chain.from_iterable(self._wait(calling))]

    def close(self) -> None:
        """See `Core.close`."""
        self._client.shutdown()
        self._end_loop()

    def _noted(self, outputs: list[SampleOutput]) -> list[SampleOutput]:
        self._ranks.end(output.request_id for output in outputs if output.finish_reason is not None)
        return outputs

    async def _add(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            await self._client.add_request_async(sample)

    async def _step(self) -> list[SampleOutput]:
        outputs = (await self._client.get_output_async()).outputs
        return [*outputs, *await self._given()]

    async def _hold(self) -> list[SampleOutput]:
        await self._client.pause_scheduler_async("keep", clear_cache=False)
        # A rank's answer comes after all its outputs.
        return await self._given()

    async def _given(self) -> list[SampleOutput]:
        outputs: list[SampleOutput] = []
        while not self._client.outputs_queue.empty():
            outputs += (await self._client.get_output_async()).outputs
        return outputs

    def _wait(self, call: Coroutine[Any, Any, R]) -> R:
        from vllm.v1.engine.exceptions import EngineDeadError

        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        while not wait([future], _LOOK_AFTER_S).done:
            if self._client.resources.engine_dead:
                future.cancel()
                raise EngineDiedError(self._death())
        try:
            return future.result()
        except EngineDeadError as error:
            raise EngineDiedError(self._death()) from error

    def _death(self) -> str:
        # Kill the remaining ranks, which wait for each other in every step.
        self._client.shutdown()
        failed = [each for each in self._processes.processes if each.exitcode]
        first = [each for each in failed if each.name == self._processes.failed_proc_name]
        ended = next((f"{each.name} with exit code {each.exitcode}" for each in first + failed), "its log says why")
        return f"a data-parallel rank ended: {ended}"

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
