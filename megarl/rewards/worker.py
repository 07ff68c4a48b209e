"""The asking side of the scoring processes."""

import asyncio
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from converters.errors import UserError
from megarl.rewards.printed import Printed
from megarl.rewards.registry import Calling, Source
from megarl.rewards.worker_main import CONNECTION_LOST, LONGEST_REPLY_BYTES

MOST_TRIES = 3
"""How many killed processes a sample, or the start of a worker, may cost."""
_PROGRAM = Path(__file__).with_name("worker_main.py")
_MEMORY_BYTES = 4 * 1024**3
_LOAD_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0
_FORGED = "it wrote to the connection that its scores go through"


class WorkerLostError(Exception):
    """A function ended its process, exhausted its memory, or corrupted its replies."""


class WorkerKilledError(WorkerLostError):
    """The process was killed by SIGKILL, for example by the kernel when out of memory."""


class Worker:
    """One process with all functions loaded; it scores one sample at a time.

    The process dies with the thread that started it, and so with the asking process.
    """

    def __init__(self) -> None:
        # Not asyncio's subprocesses: one whose start is cancelled is never reaped (Python 3.11).
        self._channel, theirs = socket.socketpair()
        self._printed = Printed()
        with theirs:
            # -P keeps the program's folder, and so this package's files, off the child's import path. With a session of
            # its own the child does not get Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(os.getpid()), str(_MEMORY_BYTES)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._printed.writing_end,
                start_new_session=True,
            )
        self._printed.close_writing_end()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def process(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    async def load(self, sources: Sequence[Source], timeout_s: float) -> list[Calling]:
        """Load the functions, which requests then name by index; returns how to call each.

        Raises UserError for one that cannot be loaded, and WorkerKilledError if the process is killed meanwhile.
        """
        self._streams = await asyncio.open_connection(sock=self._channel, limit=2 * LONGEST_REPLY_BYTES)
        self._printed.begin()
        with suppress(ConnectionError):  # the process died; the next `ask` raises how
            await self._send({"path": sys.path})
        return [await self._load(source, timeout_s) for source in sources]

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. Raises `WorkerLostError` if there is no trustworthy reply."""
        # Not guessable, so that a function cannot forge a reply by writing to the connection.
        number = secrets.randbits(64)
        self._printed.allow_more()
        assert self._streams is not None
        try:
            await self._send({"number": number, **request})
            line = await self._streams[0].readline()
        except ConnectionError:  # the process died while reading
            line = b""
        except ValueError as error:  # the line exceeds the limit
            raise WorkerLostError(_FORGED) from error
        if not line.endswith(b"\n"):
            code = await asyncio.to_thread(self._process.wait)
            raise (WorkerKilledError if code == -signal.SIGKILL else WorkerLostError)(_manner(code))
        return _reply(line, number)

    async def end(self) -> None:
        """End the process and all of its descendants; they are gone when this returns."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its descendants, then itself
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _END_TIMEOUT_S)
        with suppress(ProcessLookupError):  # in case a function has stopped or killed that process
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].close()
        self._channel.close()
        await asyncio.to_thread(self._process.wait)
        await self._printed.end()

    async def _load(self, source: Source, timeout_s: float) -> Calling:
        where = f"{source.key}={source.spec}"
        try:
            reply = await asyncio.wait_for(self.ask({"load": source}), timeout_s)
        except TimeoutError as error:
            raise UserError(f"{where}: loading it takes longer than {timeout_s:.0f} s") from error
        except WorkerKilledError as error:
            raise WorkerKilledError(f"{where}: while it was loaded, {error}") from error
        except WorkerLostError as error:
            raise UserError(f"{where}: while it was loaded, {error}") from error
        if "error" in reply:
            raise UserError(reply["error"])
        return Calling(**reply["calling"])

    async def _send(self, request: Mapping[str, Any]) -> None:
        assert self._streams is not None
        writer, body = self._streams[1], pickle.dumps(request)
        writer.write(len(body).to_bytes(8))
        writer.write(body)
        await writer.drain()


class Answered(NamedTuple):
    """A request that a worker answered: process id, and start and end in seconds since 1970."""

    process: int
    start_s: float
    end_s: float


class WorkerPool:
    """Pool of workers, which are started when needed and lent one at a time."""

    def __init__(self, sources: Sequence[Source], load_timeout_s: float = _LOAD_TIMEOUT_S) -> None:
        self._sources = sources
        self._load_timeout_s = load_timeout_s
        self._idle: list[Worker] = []
        self.answered: list[Answered] | None = None
        """Answered requests while they are recorded; None otherwise."""
        self._all: set[Worker] = set()

    async def load_first(self) -> list[Calling]:
        """Start a worker ahead of need; returns how to call the functions. Raises UserError as `Worker.load`."""
        worker, callings = await self._start()
        self.give_back(worker)
        return callings

    async def take(self) -> Worker:
        """Take an idle worker, or start one. Raises UserError as `Worker.load`."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self.end(worker)
        return (await self._start())[0]

    async def ask(self, worker: Worker, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask a worker that was taken; see `Worker.ask`."""
        start = time.time()
        reply = await worker.ask(request)
        if self.answered is not None:
            self.answered.append(Answered(worker.process, start, time.time()))
        return reply

    def give_back(self, worker: Worker) -> None:
        """Return a worker that was taken to the pool."""
        self._idle.append(worker)

    async def end(self, worker: Worker) -> None:
        """End a worker that was taken, and remove it from the pool."""
        self._all.discard(worker)
        await worker.end()

    async def close(self) -> None:
        """End all workers."""
        self._idle.clear()
        await asyncio.gather(*(self.end(worker) for worker in list(self._all)))

    async def _start(self) -> tuple[Worker, list[Calling]]:
        """Start a worker, with MOST_TRIES tries in all if it is killed while loading.

        Raises UserError if it is killed each time, or if loading fails.
        """
        for _ in range(MOST_TRIES):
            worker = Worker()
            self._all.add(worker)
            try:
                return worker, await worker.load(self._sources, self._load_timeout_s)
            except WorkerKilledError as error:
                killed = error
                await self.end(worker)
            except BaseException:
                await self.end(worker)
                raise
        raise UserError(f"{killed}, {MOST_TRIES} times") from killed


def _reply(line: bytes, number: int) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkerLostError(_FORGED) from error
    if not isinstance(reply, dict) or reply.get("number") != number:
        raise WorkerLostError(_FORGED)
    return reply


def _manner(code: int) -> str:
    if code == CONNECTION_LOST:
        return "it closed the connection that its scores go through"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"it ended its process with exit code {code}"
