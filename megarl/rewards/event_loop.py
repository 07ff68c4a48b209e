"""An event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class EventLoop:
    """Runs coroutines in a background thread.

    The thread is a daemon, so a coroutine that blocks cannot keep the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._asked: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Start a coroutine; its future may be cancelled."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop call `call`.

        Calls that arrive before the loop runs share one wake-up, which is the expensive part.
        """
        with self._lock:
            self._asked.append(call)
            if len(self._asked) > 1:
                return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call_all)

    def close(self, wait_s: float) -> None:
        """Cancel all tasks and end the thread; a blocked loop is abandoned after `wait_s` seconds."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(wait_s)

    def _call_all(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        for call in asked:
            call()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
