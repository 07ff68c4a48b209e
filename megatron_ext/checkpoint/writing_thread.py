"""A thread that writes while its caller goes on, for the ranks' part of a checkpoint and for the controller's."""

import threading
import time
from collections.abc import Callable


class WritingThread:
    """Does some `work` in a thread: whether that has ended, how long it took, and what ended it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        # In place of Thread.join: a signal that interrupts it has Python 3.11 and 3.12 take the thread for ended.
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def is_done(self) -> bool:
        """Whether all is done. Raises what ended the work before."""
        if not self._has_ended.is_set():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def wait(self) -> float:
        """Return when all is done: the seconds that it took. Raises as `is_done`."""
        self._has_ended.wait()
        self.is_done()
        return self._seconds

    def wait_for_its_end(self) -> None:
        """Return when nothing is done any more, be it that it failed or was never begun."""
        if self._thread.ident is not None:
            self._has_ended.wait()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised where the thread is waited for
            self._failure = error
        finally:
            self._seconds = time.monotonic() - began
            self._has_ended.set()
