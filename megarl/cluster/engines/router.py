"""The thread that receives the engines' answers, and restarts dead ones."""

import threading
import time
from collections.abc import Sequence

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.engine_heartbeats import INTERVAL_S, EngineHeartbeats
from megarl.cluster.engines.pending_request import PartialTurns, PendingRequest
from megarl.cluster.engines.request_queue import RequestQueue
from megarl.cluster.engines.restarts import Restarts
from megarl.cluster.workers.streams import End, next_of
from megarl.rollout.protocol import Request

_TICK_S = 0.2
"""How long a new stream's first answer may wait while the thread waits for others."""
_BATCHED_ABOVE_REQUESTS = 64
"""With more unanswered requests, answers are received in batches, as latency does not matter then."""
_BATCH_WINDOW_S = 0.02


class Router:
    """Routes requests to equal engines. One thread receives all answers, and restarts dead engines."""

    def __init__(self, handles: Sequence[EngineHandle], restarts: Restarts) -> None:
        self.queue = RequestQueue(handles, restarts.awaits)
        """The unanswered requests."""
        self._handles, self._restarts = handles, restarts
        self._heartbeats = EngineHeartbeats(handles)
        self._is_told = threading.Event()
        self._is_closed = False
        self._is_locked_out = False
        """Whether another thread held the lock of restarts at the last attempt."""
        self._listener: threading.Thread | None = None
        self._starting = threading.Lock()

    def begin(
        self, requests: Sequence[Request], among: Sequence[EngineHandle], partial_turns: Sequence[PartialTurns] = ()
    ) -> list[PendingRequest]:
        """As `RequestQueue.begin`; the first call starts the thread."""
        begun = self.queue.begin(requests, among, partial_turns)
        self._is_told.set()
        with self._starting:
            if self._listener is None:
                self._listener = threading.Thread(target=self._listen, name="router", daemon=True)
                self._listener.start()
        return begun

    def check_engines(self) -> None:
        """Restart dead engines, advance running restarts, and dispatch queued requests."""
        try:
            # Non-blocking, so that answers keep flowing during a refit, which holds this lock throughout.
            self._is_locked_out = not self._restarts.lock.acquire(blocking=False)
            if not self._is_locked_out:
                try:
                    self._restart_dead()
                finally:
                    self._restarts.lock.release()
        except Exception as failure:  # noqa: BLE001 - it is raised where an answer is waited for
            self.queue.fail_waiting(failure)
            return
        self.queue.dispatch()

    def close(self) -> None:
        """End the thread; called before the engines are ended."""
        self._is_closed = True
        self._is_told.set()
        if self._listener is not None:
            self._listener.join()

    def _listen(self) -> None:
        try:
            self._receive_all()
        except BaseException as failure:
            self.queue.fail_all(RuntimeError(f"the router failed: {failure!r}"))
            raise

    def _receive_all(self) -> None:
        next_look_s = 0.0
        while not self._is_closed:
            found = []
            if streams := self.queue.streams:
                # A finished call that only the other thread may handle would wake this one in a loop.
                calls = [] if self._is_locked_out else self._restarts.calls
                found = next_of(streams, calls, _TICK_S)
            else:
                self._is_told.wait(_TICK_S if self.queue.unanswered else INTERVAL_S)
                self._is_told.clear()
            if self._is_closed:
                break
            for stream, result in found:
                if not isinstance(result, End):
                    self.queue.receive(stream, result)
                elif self.queue.end_stream(stream, result.failure):
                    self.check_engines()
            if self.queue.unanswered > _BATCHED_ABOVE_REQUESTS:
                # Waiting and waking up cost as much as reading a result, so several are read at once.
                time.sleep(_BATCH_WINDOW_S)
            if not found or time.monotonic() > next_look_s:
                self.queue.check_submitted()
                self.check_engines()
                next_look_s = time.monotonic() + INTERVAL_S

    def _restart_dead(self) -> None:
        self._heartbeats.note_deaths()
        for handle in self._handles:
            if handle.state == "down":
                self._restarts.begin(handle)
        self._restarts.advance()
