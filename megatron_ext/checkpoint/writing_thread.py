"""A thread that writes a checkpoint's files while its caller goes on; used by ranks and controller."""

import threading
import time
from collections.abc import Callable


class WritingThread:
    """Runs `work` in a thread, and reports whether it has ended, how long it took, and its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        # Used in place of Thread.join: if a signal interrupts that, Python 3.11 and 3.12 consider the thread ended.
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_done(self) -> bool:
        """Whether the work is done. Raises its error if it failed."""
        if not self._has_ended.is_set():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def wait(self) -> float:
        """Wait until the work is done; return the seconds it took. Raises as `is_done`."""
        self._has_ended.wait()
        self.is_done()
        return self._seconds

    def wait_for_its_end(self) -> None:
        """Wait until the thread has ended, even if the work failed; return at once if it was never started."""
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
