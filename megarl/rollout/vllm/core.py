"""vLLM's engine core, which schedules and computes: in this process, or (see `data_parallel`) one per DP rank."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from megarl.rollout.protocol import EngineDiedError, EngineMemory, Load
from megarl.rollout.vllm.preemptions import Preemptions

_NOTICED_S = 1.0
"""How long vLLM may take to notice that a worker has died; another worker that waits for it may fail sooner."""

SampleRequest: TypeAlias = Any
"""vLLM's EngineCoreRequest: one sample."""
SampleOutput: TypeAlias = Any
"""vLLM's EngineCoreOutput: the result of one step for one sample."""


class Core(Protocol):
    """Computes the samples that were added, except between `hold` and `release`.

    All calls come from one thread. They raise EngineDiedError if a process that the core needs has died.
    """

    processor: Any
    """vLLM's InputProcessor, which makes the requests for samples."""

    def supported_tasks(self) -> Sequence[str]:
        """The model's supported tasks, by vLLM's names."""

    def add(self, samples: Sequence[SampleRequest], conversation: int | None) -> None:
        """Add the samples of one prompt, which may be part of a conversation (`Request.conversation`)."""

    def abort(self, ids: Sequence[str]) -> None:
        """Drop samples; called only while held."""

    def step(self) -> list[SampleOutput]:
        """Wait for new tokens and return them."""

    def load(self) -> Load | None:
        """The load after a step; None if only other processes know it."""

    def hold(self) -> list[SampleOutput]:
        """Stop computing until `release`. Returns the outputs that `step` has not returned yet."""

    def release(self) -> None:
        """Resume computing."""

    def forget(self) -> bool:
        """Drop the whole KV cache; samples in flight are recomputed. Returns whether that was possible."""

    def sleep(self) -> None:
        """Free the memory of weights and KV cache; called with nothing in flight."""

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """Restore these parts."""

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker."""

    def close(self) -> None:
        """Stop everything that it started."""


class InProcessCore:
    """The core of vLLM's LLMEngine, stepped by `step`.

    `hold` finishes the batch in flight; afterwards nothing is stepped.
    """

    def __init__(self, config: Any) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self._llm_engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._client = self._llm_engine.engine_core
        self._scheduler = self._client.engine_core.scheduler
        self._preemptions = Preemptions(self._scheduler)
        self.processor = self._llm_engine.input_processor

    def supported_tasks(self) -> Sequence[str]:
        """See `Core.supported_tasks`."""
        return self._llm_engine.get_supported_tasks()

    def add(self, samples: Sequence[SampleRequest], conversation: int | None) -> None:  # noqa: ARG002 - one for all
        """See `Core.add`."""
        for sample in samples:
            self._client.add_request(sample)

    def abort(self, ids: Sequence[str]) -> None:
        """See `Core.abort`."""
        self._client.abort_requests(list(ids))

    def step(self) -> list[SampleOutput]:
        """See `Core.step`."""
        return self._client.get_output().outputs

    def load(self) -> Load | None:
        """See `Core.load`."""
        running, waiting = self._scheduler.get_request_counts()
        return Load(running, waiting, self._scheduler.get_kv_cache_usage(), self._preemptions.take())

    def hold(self) -> list[SampleOutput]:
        """See `Core.hold`."""
        from vllm.v1.core.sched.interface import PauseState

        # With asynchronous scheduling a step leaves the next batch in flight, computed with the present weights.
        before = self._scheduler.pause_state
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        outputs = []
        while self._client.engine_core.batch_queue:
            outputs += self.step()
        self._scheduler.set_pause_state(before)
        return outputs

    def release(self) -> None:
        """See `Core.release`."""

    def forget(self) -> bool:
        """See `Core.forget`."""
        self._preemptions.forget()
        return self._client.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """See `Core.sleep`."""
        # Level 1 keeps the weights: an update rewrites everything that is loaded, but neither padding nor what vLLM
        # derived.
        with self._dying_with_its_workers():
            self._client.sleep(1)

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Core.wake_up`."""
        with self._dying_with_its_workers():
            self._client.wake_up(list(parts))

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """See `Core.call_workers`."""
        with self._dying_with_its_workers():
            return self._client.collective_rpc(method, args=arguments)

    def close(self) -> None:
        """See `Core.close`."""
        self._client.shutdown()

    @contextmanager
    def _dying_with_its_workers(self) -> Iterator[None]:
        """Raise EngineDiedError if a call of the workers fails and one has died: no later call could succeed."""
        try:
            yield
        except Exception as error:
            if self._has_lost_a_worker():
                raise EngineDiedError(f"a worker of vLLM ended: {error}") from error
            raise

    def _has_lost_a_worker(self) -> bool:
        executor, deadline_s = self._client.engine_core.model_executor, time.monotonic() + _NOTICED_S
        # An executor whose worker is in this process has no such flag.
        if not hasattr(executor, "is_failed"):
            return False
        while not executor.is_failed and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return executor.is_failed
