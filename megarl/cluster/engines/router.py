"""The thread that hears of engines: of their answers, deaths and restarts."""

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
"""How long an engine that is asked for the first time may go unheard while others are listened to."""
_MANY = 64
"""Where more requests are unanswered, answers are heard of together: the next batch does not wait for each of them."""
_TOGETHER_S = 0.02


class Router:
    """Sends requests to engines that are alike. One thread hears of all answers, deaths and restarts."""

    def __init__(self, handles: Sequence[EngineHandle], restarts: Restarts) -> None:
        self.queue = RequestQueue(handles, restarts.awaits)
        """The requests that have no answer yet."""
        self._handles, self._restarts = handles, restarts
        self._heartbeats = EngineHeartbeats(handles)
        self._is_told = threading.Event()
        self._is_closed = False
        self._is_kept_out = False
        """Whether another thread had to do with restarts when this one wanted to."""
        self._listener: threading.Thread | None = None
        self._starting = threading.Lock()

    def begin(
        self, requests: Sequence[Request], among: Sequence[EngineHandle], partial_turns: Sequence[PartialTurns] = ()
    ) -> list[PendingRequest]:
        """As `RequestQueue.begin`; from the first time on, answers are heard of."""
        begun = self.queue.begin(requests, among, partial_turns)
        self._is_told.set()
        with self._starting:
            if self._listener is None:
                self._listener = threading.Thread(target=self._listen, name="router", daemon=True)
                self._listener.start()
        return begun

    def check_engines(self) -> None:
        """Begin to restart who has died, go on with who is started, and send what waits to who serves."""
        try:
            # Who holds it has to do with restarts, for as long as a refit takes: others have answers to be heard of.
            self._is_kept_out = not self._restarts.lock.acquire(blocking=False)
            if not self._is_kept_out:
                try:
                    self._bring_back()
                finally:
                    self._restarts.lock.release()
        except Exception as failure:  # noqa: BLE001 - it is raised where an answer is waited for
            self.queue.fail_waiting(failure)
            return
        self.queue.go_on()

    def close(self) -> None:
        """Hear of nothing more, before the engines are ended."""
        self._is_closed = True
        self._is_told.set()
        if self._listener is not None:
            self._listener.join()

    def _listen(self) -> None:
        try:
            self._hear_all()
        except BaseException as failure:
            self.queue.fail_all(RuntimeError(f"the router failed: {failure!r}"))
            raise

    def _hear_all(self) -> None:
        next_look_s = 0.0
        while not self._is_closed:
            found = []
            if streams := self.queue.streams:
                # Where another thread goes on with them, a call that has ended would wake this one again and again.
                calls = [] if self._is_kept_out else self._restarts.calls
                found = next_of(streams, calls, _TICK_S)
            else:
                self._is_told.wait(_TICK_S if self.queue.unanswered else INTERVAL_S)
                self._is_told.clear()
            if self._is_closed:
                break
            for stream, result in found:
                if not isinstance(result, End):
                    self.queue.hear(stream, result)
                elif self.queue.lose(stream, result.failure):
                    self.check_engines()
            if self.queue.unanswered > _MANY:
                # To wait for a result, and to wake whoever waits for its answer, costs as much as to read it.
                time.sleep(_TOGETHER_S)
            if not found or time.monotonic() > next_look_s:
                self.queue.hear_of_submitted()
                self.check_engines()
                next_look_s = time.monotonic() + INTERVAL_S

    def _bring_back(self) -> None:
        self._heartbeats.note_deaths()
        for handle in self._handles:
            if handle.state == "down":
                self._restarts.begin(handle)
        self._restarts.go_on()
