"""Processes that score, seen from the one that asks."""

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
"""How many processes a sample, or the start of one, may cost."""
_PROGRAM = Path(__file__).with_name("worker_main.py")
_MEMORY_BYTES = 4 * 1024**3
_LOAD_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0
_FORGED = "it wrote to the connection that its scores go through"


class WorkerLostError(Exception):
    """A function ended its process, left it without memory, or made its answers worthless."""


class WorkerKilledError(WorkerLostError):
    """Somebody killed the process by force: the kernel, for want of memory, or whoever may."""


class Worker:
    """One process with all functions loaded; it answers one question at a time.

    It dies with the thread that made it, and so with its process.
    """

    def __init__(self) -> None:
        # Not asyncio's own subprocesses: one whose start is cancelled is never waited for to its end (Python 3.11).
        self._channel, theirs = socket.socketpair()
        self._printed = Printed()
        with theirs:
            # -P keeps the folder of the program, and with it this package's own files, off the child's import path. A
            # session of its own keeps Ctrl-C for the parent.
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
        """The number of its process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    async def load(self, sources: Sequence[Source], timeout_s: float) -> list[Calling]:
        """Load the functions, which are then asked by their places.

        Raises UserError for one that cannot be loaded, and WorkerKilledError, which is no fault of theirs.
        """
        self._streams = await asyncio.open_connection(sock=self._channel, limit=2 * LONGEST_REPLY_BYTES)
        self._printed.begin()
        with suppress(ConnectionError):  # it died; whoever asks it next hears how
            await self._send({"path": sys.path})
        return [await self._load(source, timeout_s) for source in sources]

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply. Raises `WorkerLostError` if there will be none that can be trusted."""
        # Not guessable: what a function writes where replies go is no reply to anything.
        number = secrets.randbits(64)
        self._printed.allow_more()
        assert self._streams is not None
        try:
            await self._send({"number": number, **request})
            line = await self._streams[0].readline()
        except ConnectionError:  # it died while it read
            line = b""
        except ValueError as error:  # no line ends within the limit
            raise WorkerLostError(_FORGED) from error
        if not line.endswith(b"\n"):
            code = await asyncio.to_thread(self._process.wait)
            raise (WorkerKilledError if code == -signal.SIGKILL else WorkerLostError)(_manner(code))
        return _reply(line, number)

    async def end(self) -> None:
        """End the process, and all that came of it; when this returns, they are gone."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends the others, then itself
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _END_TIMEOUT_S)
        with suppress(ProcessLookupError):  # for one that a function has stopped or killed
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
    """A question that a worker's process answered: its number, and seconds since 1970."""

    process: int
    start_s: float
    end_s: float


class WorkerPool:
    """Workers that are lent one by one, started as they are needed."""

    def __init__(self, sources: Sequence[Source], load_timeout_s: float = _LOAD_TIMEOUT_S) -> None:
        self._sources = sources
        self._load_timeout_s = load_timeout_s
        self._idle: list[Worker] = []
        self.answered: list[Answered] | None = None
        """Questions that were answered; None where nobody asks for them."""
        self._all: set[Worker] = set()

    async def load_first(self) -> list[Calling]:
        """Start a worker before one is needed: how the functions are called. Raises UserError as `Worker.load`."""
        worker, callings = await self._start()
        self.give_back(worker)
        return callings

    async def take(self) -> Worker:
        """A worker that is ready. Raises UserError as `Worker.load`."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self.end(worker)
        return (await self._start())[0]

    async def ask(self, worker: Worker, request: Mapping[str, Any]) -> dict[str, Any]:
        """See `Worker.ask`, of one that was taken."""
        start = time.time()
        reply = await worker.ask(request)
        if self.answered is not None:
            self.answered.append(Answered(worker.process, start, time.time()))
        return reply

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

    async def _start(self) -> tuple[Worker, list[Calling]]:
        """Start a worker; try again, MOST_TRIES times in all, if it is killed while loading.

        Raises UserError where it is killed each time, and where loading fails.
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
