"""How the ranks of a refit connect: seconds, connections and memory, by number of ranks and transport.

Every rank is a process, and every source has a message for every destination, which is more pairs than in a plan. A
first refit with only these small messages follows, and all values are verified.
"""

import argparse
import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import at_least_one, describe
from rich import box
from rich.console import Console
from rich.table import Table

from converters.boxes import Box
from megarl.resharding.direct.messages import Message, Piece
from megarl.resharding.direct.receiver import Receiver
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.tracking.versions import versions
from megatron_ext.loopback import LOOPBACK, open_store

_DEADLINE_S = 300.0
_MESSAGE_BYTES = 4096
_TRANSPORTS = ("shared_memory", "tcp", "rdma")
_SIZES = ((4, 4), (16, 8), (32, 16), (43, 21))


@dataclass(frozen=True)
class Observed:
    """Cost of joining for one rank; all ranks' times are on the same clock."""

    begun_s: float
    ended_s: float
    cpu_s: float
    sockets: int
    extra_bytes: int


class Rank:
    """A process: rank `rank` of one side, whose `peers` are all ranks of the other."""

    def __init__(self, is_source: bool, rank: int, peers: int) -> None:
        torch.set_num_threads(1)
        self._is_source, self._rank = is_source, rank
        self._tensors = {str(peer): torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8) for peer in range(peers)}
        if is_source:
            for peer, tensor in self._tensors.items():
                tensor.fill_(_value(rank, int(peer)))
        self._messages = {peer: [self._message(peer)] for peer in range(peers)}
        self._side: Sender | Receiver | None = None

    def listen(self) -> tuple[str, int]:
        """Return the address of a source."""
        self._side = Sender(self._rank, self._messages, self._tensors, LOOPBACK)
        return self._side.address

    def connect(self, rendezvous: Rendezvous) -> Observed:
        """Connect to all ranks of the other side."""
        before, sockets = _anonymous_bytes(), _sockets()
        begun, cpu = time.monotonic(), time.process_time()
        if isinstance(self._side, Sender):
            self._side.connect(rendezvous)
        else:
            self._side = Receiver(self._rank, self._messages, self._tensors, rendezvous)
            self._side.connect()
        ended = time.monotonic()
        return Observed(begun, ended, time.process_time() - cpu, _sockets() - sockets, _anonymous_bytes() - before)

    def refit(self, version: int) -> tuple[float, float]:
        """Send or receive everything; return start and end."""
        begun = time.monotonic()
        if isinstance(self._side, Sender):
            self._side.send(version)
        elif self._side is not None:
            self._side.receive(version)
        return begun, time.monotonic()

    def is_right(self) -> bool:
        """Whether a destination has the values that each source sent."""
        return self._is_source or all(
            bool((tensor == _value(int(peer), self._rank)).all()) for peer, tensor in self._tensors.items()
        )

    def _message(self, peer: int) -> Message:
        source, destination = (self._rank, peer) if self._is_source else (peer, self._rank)
        whole = Box((0,), (_MESSAGE_BYTES,))
        return Message((Piece(str(destination), whole, str(source), whole, torch.uint8, 0),), _MESSAGE_BYTES)


def _value(source: int, destination: int) -> int:
    return (source * 31 + destination * 7 + 1) % 251


def _sockets() -> int:
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        # The descriptor of the folder that is being read is listed, too, and may be gone by now.
        if os.path.lexists(entry.path) and os.readlink(entry.path).startswith("socket:"):
            found += 1
    return found


def _anonymous_bytes() -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )


def _serve(pipe: Connection, *arguments: Any) -> None:
    rank = Rank(*arguments)
    pipe.send(None)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(rank, method)(*given))


class Ranks:
    """The processes of all ranks, sources first; `call` calls a method in some and waits for all of them."""

    def __init__(self, pipes: Sequence[Connection], sources: int) -> None:
        self.sources, self.all = range(sources), range(len(pipes))
        self._pipes = pipes

    def call(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Return the results. Raises EOFError if a rank has ended."""
        for rank in ranks:
            self._pipes[rank].send((method, arguments))
        for rank in ranks:
            if not self._pipes[rank].poll(_DEADLINE_S):
                raise TimeoutError(f"rank {rank} said nothing for {_DEADLINE_S:g} s")
        return [self._pipes[rank].recv() for rank in ranks]


@contextmanager
def _running(sources: int, destinations: int) -> Iterator[Ranks]:
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    try:
        for is_source, ranks, peers in ((True, sources, destinations), (False, destinations, sources)):
            for rank in range(ranks):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, is_source, rank, peers), daemon=True)
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield Ranks(pipes, sources)
    finally:
        for process in processes:
            process.kill()
            process.join()


@dataclass(frozen=True)
class Meeting:
    """Measurements of all ranks joining a transport, then making one refit and another."""

    join_s: float
    cpu_s: float
    refit_s: float
    sockets_of_a_source: int
    sockets_of_a_destination: int
    extra_bytes_of_a_source: float
    extra_bytes_of_a_destination: float


def meet(transport: str, sources: int, destinations: int) -> Meeting:
    """Start all processes, let them join, and measure that. Raises ValueError if a value is wrong afterwards."""
    with _running(sources, destinations) as ranks:
        store = open_store(LOOPBACK, timedelta(seconds=_DEADLINE_S)) if TRANSPORTS[transport].needs_store else None
        listeners = ranks.call(ranks.sources, "listen")
        address = (LOOPBACK, store.port) if store else None
        rendezvous = Rendezvous(transport, secrets.token_bytes(16), listeners, address, destinations, _DEADLINE_S)
        met = ranks.call(ranks.all, "connect", rendezvous)
        for version in range(2):
            times = ranks.call(ranks.all, "refit", version)
        if not all(ranks.call(ranks.all, "is_right")):
            raise ValueError(f"{transport}: a value is wrong")
    of_sources, of_destinations = met[:sources], met[sources:]
    return Meeting(
        max(each.ended_s for each in met) - min(each.begun_s for each in met),
        sum(each.cpu_s for each in met),
        max(ended for _, ended in times) - min(begun for begun, _ in times),
        max(each.sockets for each in of_sources),
        max(each.sockets for each in of_destinations),
        median(each.extra_bytes for each in of_sources),
        median(each.extra_bytes for each in of_destinations),
    )


def _table(found: Mapping[tuple[str, int, int], Sequence[Meeting]]) -> Table:
    table = Table(
        "transport",
        "sources x destinations",
        "s to join",
        "CPU ms a pair",
        "s of a refit",
        "sockets of a source",
        "of a destination",
        "extra MB of a source",
        "of a destination",
        box=box.MARKDOWN,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for (transport, sources, destinations), meetings in found.items():
        cpu_s = median(each.cpu_s for each in meetings)
        table.add_row(
            transport,
            f"{sources} x {destinations}",
            f"{median(each.join_s for each in meetings):.2f}",
            f"{1e3 * cpu_s / (sources * destinations):.2f}",
            f"{median(each.refit_s for each in meetings):.3f}",
            str(max(each.sockets_of_a_source for each in meetings)),
            str(max(each.sockets_of_a_destination for each in meetings)),
            f"{median(each.extra_bytes_of_a_source for each in meetings) / 1e6:.1f}",
            f"{median(each.extra_bytes_of_a_destination for each in meetings) / 1e6:.1f}",
        )
    return table


def main() -> None:
    """Measure and print; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", choices=_TRANSPORTS, nargs="+", default=list(_TRANSPORTS), help="which to try")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="meetings of each")
    parser.add_argument("--most-ranks", type=at_least_one, default=64, help="leave out what takes more processes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args()
    # Ranks are forked from a process that has imported torch and UCX, which measures the clock rate on import.
    multiprocessing.set_forkserver_preload(["join", "ucx_loaded"])
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    multiprocessing.forkserver.ensure_running()
    ours = {name: version for name, version in versions().items() if name in ("python", "megarl", "torch", "nixl-cu12")}
    facts = {
        "Date": date.today().isoformat(),
        "Machine": describe(Path("/dev/shm")),
        "Versions": ", ".join(f"{name} {version}" for name, version in ours.items()),
        "Command": f"`python {shlex.join(sys.argv)}`",
    }
    found: dict[tuple[str, int, int], list[Meeting]] = {}
    sizes = [size for size in _SIZES if sum(size) <= options.most_ranks]
    for _ in range(options.rounds):
        for size in sizes:
            for transport in options.transports:
                meeting = meet(transport, *size)
                print(f"{transport} {size[0]} x {size[1]}: {meeting.join_s:.2f} s, {meeting.refit_s:.3f} s")
                found.setdefault((transport, *size), []).append(meeting)
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(_table(found))
    rows = "\n".join(line.strip() for line in capture.get().splitlines() if line.strip())
    print(rows)
    if options.markdown is not None:
        head = "".join(f"{name}: {fact}\n\n" for name, fact in facts.items())
        options.markdown.write_text(f"# How the ranks of a refit meet, on a CPU\n\n{head}{rows}\n\n{_NOTES}")


_NOTES = """\
- Each rank is a process; each source has a message of 4 KiB for each destination, so that all pairs meet. In a plan
  most do not ([plan_671b.md](plan_671b.md) counts those that do: of 512 ranks and 256
  workers, a worker meets up to 500). At the CPU time of a pair measured here, of which each end has about a half, the
  busiest worker of that plan would meet all of them in 0.1 to 0.3 s by tcp or memory, on a core of its own.
- Seconds to join go from the first rank that begins to the last that has met all others, medians of the rounds. The
  ranks share the cores of this machine, so that the seconds grow with the pairs; on machines of their own, with those
  of one rank. A rank meets all its peers at the same time: what it waits for is the slowest of them, and what adds up
  is CPU time. CPU ms a pair are those of all ranks together, the start of an agent of NIXL in each among them.
- By rdma all pairs together, an agent in each rank among them, take 2.3 ms of CPU time a pair and 35 ms an agent (least
  squares: within 12 % of each row), sockets are 5 + 2 for each destination at a source, 6 + 2 for each source at a
  destination, and memory grows by about 0.014 MB for each destination and 0.006 MB for each source. So of 256 sources
  and 128 destinations that all meet, each on a core of its own, a source would take 0.18 s, 261 sockets and 2.9 MB, a
  destination 0.33 s, 518 sockets and 2.6 MB, and a worker that meets 500 sources 0.62 s: counted, not measured.
- Over tcp, where ranks meet at a store before gloo connects them, some meetings of 64 last 5 s longer than others: the
  store of torch asks for the name of the address at each end of each connection, and a resolver waits so long for an
  answer that is lost. With numeric names (`getnameinfo` replaced, 2026-11-27) none of 6 meetings was late: 1.2 to 2.2 s
  on busy cores; without, 3 of 6 were, with 6.3 to 6.9 s.
- Seconds of a refit are those of the second, of these small messages: what announcing and acknowledging them costs.
- Sockets and memory (RssAnon) are what a process has more when it has met all others than before.
"""


if __name__ == "__main__":
    main()
