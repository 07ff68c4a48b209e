"""Processes that score, seen from the one that asks."""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("worker_main.py")
_MEMORY_BYTES = 4 * 1024**3
_LONGEST_REPLY_BYTES = 16 * 1024**2
_START_TIMEOUT_S = 300.0


class WorkerDied(Exception):  # noqa: N818 - says what happened
    """A function ended its process, or left it without memory."""


class Worker:
    """One process with all functions loaded; it answers one question at a time.

    It dies with the thread that made it, and so with its process.
    """

    def __init__(self) -> None:
        # Not asyncio's own subprocesses: one whose start is cancelled is never waited for to its end (Python 3.11).
        self._channel, theirs = socket.socketpair()
        with theirs:
            # -P keeps the folder of the program, and with it this package's own files, off the child's import path. A
            # session of its own keeps Ctrl-C for the parent.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(os.getpid()), str(_MEMORY_BYTES)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    async def load(self, functions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Load the functions, each a spec of `load_reward` and its options. Raises RuntimeError if that fails."""
        self._streams = await asyncio.open_connection(sock=self._channel, limit=_LONGEST_REPLY_BYTES)
        setup = {"path": sys.path, "functions": [(spec, dict(options)) for spec, options in functions]}
        reply = await asyncio.wait_for(self.ask(setup), _START_TIMEOUT_S)
        if "error" in reply:
            raise RuntimeError(f"a process that scores could not load the reward functions: {reply['error']}")

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply. Raises `WorkerDied` if there will be none."""
        assert self._streams is not None
        reader, writer = self._streams
        body = pickle.dumps(request)
        try:
            writer.write(len(body).to_bytes(8))
            writer.write(body)
            await writer.drain()
            reply = await reader.readline()
        except ConnectionError:  # it died while it read
            reply = b""
        if not reply.endswith(b"\n"):
            raise WorkerDied(_manner(await asyncio.to_thread(self._process.wait)))
        return json.loads(reply)

    async def end(self) -> None:
        """End the process, and what it started in its session; when this returns, it is gone."""
        with suppress(ProcessLookupError):  # it may be gone, and what it started still be there
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].close()
        self._channel.close()
        await asyncio.to_thread(self._process.wait)


class WorkerPool:
    """Workers that are lent one by one, started as they are needed."""

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._functions = functions
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def take(self) -> Worker:
        """A worker that is ready."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self.end(worker)
        worker = Worker()
        self._all.add(worker)
        try:
            await worker.load(self._functions)
        except BaseException:
            await self.end(worker)
            raise
        return worker

    def give_back(self, worker: Worker) -> None:
        """Lend it to the next."""
        self._idle.append(worker)

    async def end(self, worker: Worker) -> None:
        """End a worker that was taken."""
        self._all.discard(worker)
        await worker.end()

    async def close(self) -> None:
        """End them all."""
        self._idle.clear()
        await asyncio.gather(*(self.end(worker) for worker in list(self._all)))


def _manner(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"it ended its process with exit code {code}"
