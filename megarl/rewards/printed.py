"""Passes the prints of reward functions on to stderr, up to a limit: a response may make one print without end."""

import asyncio
import os
from contextlib import suppress

LONGEST_PRINTED_BYTES = 64 * 1024
"""Limit of the bytes passed on for one sample."""

_STDERR = 2
_END_TIMEOUT_S = 1.0


class Printed:
    """The stdout and stderr of one process that scores."""

    def __init__(self) -> None:
        reading_end, self.writing_end = os.pipe()
        self._reading_end = os.fdopen(reading_end, "rb", buffering=0)
        self._left = LONGEST_PRINTED_BYTES
        self._task: asyncio.Task[None] | None = None

    def close_writing_end(self) -> None:
        """Leave the writing end to the process."""
        os.close(self.writing_end)

    def begin(self) -> None:
        """Pass on what comes from now."""
        self._task = asyncio.create_task(self._pass_on())

    def allow_more(self) -> None:
        """Begin to count from zero, for the next sample."""
        self._left = LONGEST_PRINTED_BYTES

    async def end(self) -> None:
        """Pass on what is left; all that could write have ended."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_END_TIMEOUT_S)
            self._task.cancel()
        self._reading_end.close()

    async def _pass_on(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._reading_end)
        try:
            while data := await reader.read(LONGEST_PRINTED_BYTES):
                if self._left:
                    await asyncio.to_thread(_show, self._cut(data))
        finally:
            transport.close()

    def _cut(self, data: bytes) -> bytes:
        shown, self._left = data[: self._left], max(self._left - len(data), 0)
        if self._left:
            return shown
        note = f"megarl: a reward function printed {LONGEST_PRINTED_BYTES} bytes over one sample, the rest is not shown"
        return shown + f"\n{note}\n".encode()


def _show(data: bytes) -> None:
    with suppress(OSError):  # there is nobody to look at it
        while data:
            data = data[os.write(_STDERR, data) :]
