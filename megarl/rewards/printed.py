"""Forwarding of the output of reward functions to stderr, up to a limit: a response may make one print endlessly."""

import asyncio
import os
from contextlib import suppress

LONGEST_PRINTED_BYTES = 64 * 1024
"""Limit of the bytes that are forwarded for one sample."""

_STDERR = 2
_END_TIMEOUT_S = 1.0


class Printed:
    """Forwards stdout and stderr of one scoring process."""

    def __init__(self) -> None:
        reading_end, self.writing_end = os.pipe()
        self._reading_end = os.fdopen(reading_end, "rb", buffering=0)
        self._left = LONGEST_PRINTED_BYTES
        self._task: asyncio.Task[None] | None = None

    def close_writing_end(self) -> None:
        """Close this process's copy of the writing end, which the scoring process has inherited."""
        os.close(self.writing_end)

    def begin(self) -> None:
        """Start forwarding."""
        self._task = asyncio.create_task(self._pass_on())

    def allow_more(self) -> None:
        """Reset the limit for the next sample."""
        self._left = LONGEST_PRINTED_BYTES

    async def end(self) -> None:
        """Forward the rest and close; call it once every process that could write has ended."""
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
    with suppress(OSError):  # stderr is closed
        while data:
            data = data[os.write(_STDERR, data) :]
