"""The processes of the ranks: spawned, controlled through pipes, and timed on one clock."""

import multiprocessing
import os
import secrets
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from resharding.memory import Held, held_by

DEADLINE_S = 120.0
"""Timeout of everything that a process waits for."""
_RELEASE_S = 0.02
"""Time after which a barrier has surely released all processes."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class RankFailedError(RuntimeError):
    """A rank's process ended, or a call in it failed; the message contains its traceback."""


@dataclass(frozen=True)
class Place:
    """A process's place among the others."""

    rank: int
    ranks: int
    pipes: Mapping[int, Connection]
    """Pipes to all other ranks."""


@dataclass(frozen=True)
class Timed:
    """One call, made by all ranks at the same time."""

    seconds: float
    """From the start, which is the same instant for all ranks, to the last rank's end."""
    cpu_seconds_by_rank: Sequence[float]
    """CPU time of each rank, over all its threads."""

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all ranks."""
        return sum(self.cpu_seconds_by_rank)


class Start:
    """An instant at which all processes begin a call.

    A barrier alone releases them one after the other, which takes milliseconds; here the last to arrive chooses an
    instant after that.
    """

    def __init__(self, context: SpawnContext, ranks: int) -> None:
        self._instant = context.Value("d", 0.0)
        self._barrier = context.Barrier(ranks, partial(_choose, self._instant))

    def wait(self) -> float:
        """Return at the instant, which is the same in all processes, on a clock that they share."""
        self._barrier.wait(DEADLINE_S)
        instant: float = self._instant.value
        time.sleep(max(0.0, instant - time.monotonic()))
        return instant


def _choose(instant: "Synchronized[float]") -> None:
    instant.value = time.monotonic() + _RELEASE_S


class Ranks:
    """The processes, one per rank. `call` makes a call in all of them and waits for all."""

    def __init__(self, processes: Sequence[Any], commands: Sequence[Connection]) -> None:
        self._processes = processes
        self._commands = commands

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Results of the method, in rank order. Raises RankFailedError if a rank fails or does not answer."""
        for command in self._commands:
            command.send((method, arguments, False))
        return self._answers()

    def time(self, method: str, *arguments: Any) -> Timed:
        """Like `call`, started by all ranks at the same time, and measured."""
        for command in self._commands:
            command.send((method, arguments, True))
        answers = self._answers()
        begun, ended, cpu_seconds = zip(*answers, strict=True)
        return Timed(max(ended) - min(begun), cpu_seconds)

    def held(self) -> list[Held]:
        """The memory of every rank."""
        return [held_by(process.pid) for process in self._processes]

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(answers) < len(self._commands):
            open_pipes = [pipe for rank, pipe in enumerate(self._commands) if rank not in answers]
            answered = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not answered:
                raise RankFailedError(f"{len(open_pipes)} ranks said nothing for {DEADLINE_S:g} s")
            for pipe in answered:
                rank = self._commands.index(pipe)
                answers[rank] = _answer(rank, self._commands[rank])
        return [answers[rank] for rank in range(len(answers))]


def _answer(rank: int, pipe: Connection) -> Any:
    try:
        failed, answer = pipe.recv()
    except (EOFError, ConnectionResetError) as error:  # the latter if it ended before reading the call
        raise RankFailedError(f"the process of rank {rank} has ended") from error
    if failed:
        raise RankFailedError(f"rank {rank} failed:\n{answer}")
    return answer


@contextmanager
def running(ranks: int, make: Callable[..., Any], *arguments: Any) -> Iterator[Ranks]:
    """Start processes that call `make(Place, *arguments)`; `Ranks.call` calls methods of the returned object.

    They form the default group of torch.distributed, over gloo on loopback, and end with the context.
    """
    context = multiprocessing.get_context("spawn")
    pipes = {(a, b): context.Pipe() for a in range(ranks) for b in range(a + 1, ranks)}
    start = Start(context, ranks)
    commands, processes = [], []
    with tempfile.TemporaryDirectory() as folder, _environment():
        store = str(Path(folder) / secrets.token_hex(8))
        try:
            for rank in range(ranks):
                ends = {b: pipes[a, b][0] for a, b in pipes if a == rank}
                ends |= {a: pipes[a, b][1] for a, b in pipes if b == rank}
                mine, theirs = context.Pipe()
                target = (Place(rank, ranks, ends), theirs, start, store, make, arguments)
                processes.append(context.Process(target=_serve, args=target, daemon=True))
                processes[-1].start()
                theirs.close()
                commands.append(mine)
            started = Ranks(processes, commands)
            started._answers()
            yield started
        finally:
            for process in processes:
                process.kill()
                process.join()


@contextmanager
def _environment() -> Iterator[None]:
    """Set environment variables that the processes read on startup."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _serve(
    place: Place,
    commands: Connection,
    start: Start,
    store: str,
    make: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    timeout = timedelta(seconds=DEADLINE_S)
    torch.set_num_threads(1)
    # Megatron warns about missing packages, torch about deprecations.
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=place.rank, world_size=place.ranks, timeout=timeout
        )
        served = make(place, *arguments)
        commands.send((False, None))
        with suppress(EOFError):
            while True:
                method, given, timed = commands.recv()
                call = getattr(served, method)
                commands.send((False, _timed(call, given, start) if timed else call(*given)))
    except BaseException:  # noqa: BLE001 - goes to the process that started this one
        with suppress(OSError):
            commands.send((True, traceback.format_exc()))


def _timed(call: Callable[..., Any], arguments: Sequence[Any], start: Start) -> tuple[float, float, float]:
    begun = start.wait()
    cpu = time.process_time()
    call(*arguments)
    return begun, time.monotonic(), time.process_time() - cpu


def say(pipe: Connection, number: int = 0) -> None:
    """Send a byte."""
    pipe.send_bytes(bytes([number]))


def hear(pipe: Connection) -> int:
    """Wait for the next byte. Raises RankFailedError if none comes in time."""
    heard_of([pipe])
    (number,) = pipe.recv_bytes()
    return number


def heard_of(pipes: Sequence[Connection]) -> list[Connection]:
    """Wait for pipes with data; return at least one. Raises RankFailedError if nothing comes in time."""
    found = cast(list[Connection], wait(pipes, DEADLINE_S))
    if not found:
        raise RankFailedError(f"nobody said anything for {DEADLINE_S:g} s")
    return found
