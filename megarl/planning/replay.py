"""Replays a refit event by event: every message waits for a bucket, for its ports and for its receiver's memory."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from converters.cost import Rates, Traffic
from converters.topology import Topology
from megarl.planning.messages import Integers, Messages, Path, Routes, nanoseconds, traffic_messages

_PACKED, _ARRIVED, _UNPACKED, _DEPARTED = range(4)
_NEVER = -1


@dataclass(frozen=True)
class RankRates:
    """Bytes per second at which a rank packs and unpacks messages, and the fixed cost of a message for both its ranks.

    Meanwhile, ports can transfer other messages. If the ranks of a node share `cores`, each packing or unpacking, and
    each transfer inside the node, occupies one core.
    """

    pack_bytes_per_s: float
    unpack_bytes_per_s: float
    message_s: float = 0.0
    cores: int | None = None
    """Processor cores of a node; None if ranks do not share cores but work independently, as on GPUs."""


@dataclass(frozen=True)
class Replay:
    """The time of every event, in nanoseconds from the start: int64 [messages], relayed messages last.

    Packing and buckets of relayed messages are left out, as if the node's GPUs read them where they arrived.
    """

    messages: Messages
    """The sender of a relayed message is numbered `sources` + destination rank."""
    routes: Routes
    packed: Integers
    departed: Integers
    arrived: Integers
    unpacked: Integers

    @property
    def seconds(self) -> float:
        """Seconds until the last message is unpacked."""
        return float(self.unpacked.max(initial=0)) / 1e9


def replay(traffic: Traffic, rates: Rates, work: RankRates, *, bucket_bytes: int, buckets: int) -> Replay:
    """Replay `traffic` with messages of at most `bucket_bytes`.

    Each port serves one message at a time at its full rate. A message occupies the port out of its sender's GPU and the
    port into its receiver's GPU at the same time. A source packs its messages one at a time, in `sending_order`, into a
    free one of its `buckets`; the bucket is free again when the receiver has unpacked the message. A receiver has as
    many buckets for incoming messages, and unpacks one message at a time. If several messages could depart, those that
    have waited for the receiver's port go first. A destination relays to another one in parts, each of which departs
    when the same share of the sender's own bytes has been unpacked. Tasks that need a core get one in first-come,
    first-served order.
    """
    direct, relayed = traffic_messages(traffic, bucket_bytes)
    sources = len(traffic.direct)
    routes = [Routes.of(each, traffic.topology, rates, relayed=each is relayed) for each in (direct, relayed)]
    machine = _Machine(
        _join(direct, relayed, sources),
        _join_routes(*routes),
        work,
        own_bytes=traffic.direct.sum(axis=0),
        nodes=_Nodes(traffic.topology, work.cores),
        sources=sources,
        ports=len(Path) * traffic.topology.gpus,
        buckets=buckets,
    )
    machine.run()
    return machine.record()


def _join(direct: Messages, relayed: Messages, sources: int) -> Messages:
    pairs = {name: (values, getattr(relayed, name)) for name, values in vars(direct).items()}
    pairs["sender"] = (direct.sender, relayed.sender + sources)
    return Messages(**{name: np.concatenate(pair) for name, pair in pairs.items()})


def _join_routes(direct: Routes, relayed: Routes) -> Routes:
    return Routes(**{name: np.concatenate((values, getattr(relayed, name))) for name, values in vars(direct).items()})


class _Nodes:
    """The nodes of all ranks, their free cores, and the tasks that wait for one."""

    def __init__(self, topology: Topology, cores: int | None) -> None:
        self.cores = cores
        self.of_source, self.of_destination = list(topology.source_node), list(topology.destination_node)
        self._free = [cores or 0] * topology.nodes
        self._waiting: list[deque[tuple[int, int, int]]] = [deque() for _ in self._free]

    def take_core(self, node: int, work: tuple[int, int, int]) -> bool:
        """Take a core for a task and return True; if none is free, queue the task and return False."""
        if self._free[node]:
            self._free[node] -= 1
            return True
        self._waiting[node].append(work)
        return False

    def leave_core(self, node: int) -> tuple[int, int, int] | None:
        """Release a core; return the task that gets it, if one waits."""
        if self._waiting[node]:
            return self._waiting[node].popleft()
        self._free[node] += 1
        return None


class _Machine:
    """The state of all ranks and ports, in plain lists, which are faster than numpy for single events."""

    def __init__(
        self,
        messages: Messages,
        routes: Routes,
        work: RankRates,
        *,
        own_bytes: Integers,
        nodes: "_Nodes",
        sources: int,
        ports: int,
        buckets: int,
    ) -> None:
        self._messages, self._routes = messages, routes
        total, destinations = len(messages.sender), len(own_bytes)
        self._sender, self._receiver, self._bytes = (
            values.tolist() for values in (messages.sender, messages.receiver, messages.nbytes)
        )
        self._out, self._in, self._move_ns = (
            values.tolist() for values in (routes.out_port, routes.in_port, routes.nanoseconds)
        )
        message_ns = round(work.message_s * 1e9)
        self._pack_ns = (nanoseconds(messages.nbytes, work.pack_bytes_per_s) + message_ns).tolist()
        self._unpack_ns = (nanoseconds(messages.nbytes, work.unpack_bytes_per_s) + message_ns).tolist()
        self._nodes = nodes
        bounds = np.searchsorted(messages.sender, np.arange(sources + 1)).tolist()
        self._next, self._end = bounds[:-1], bounds[1:]
        self._direct = bounds[-1]  # messages before this one come from sources
        self._packing, self._free = [False] * sources, [buckets] * sources
        self._landing = [buckets] * destinations
        self._to_unpack: list[deque[int]] = [deque() for _ in range(destinations)]
        self._unpacking = [False] * destinations
        self._out_busy, self._in_busy = [False] * ports, [False] * ports
        self._ready: list[dict[int, None]] = [{} for _ in range(ports)]  # by port out, in order
        self._waiting: list[deque[int]] = [deque() for _ in range(ports)]  # by port in; a start does not remove one
        self._is_waiting = bytearray(total)
        self._relays = self._gates(sources, own_bytes)
        self._unpacked_bytes = [0] * destinations
        self._heap: list[tuple[int, int, int]] = []
        self._now = 0
        self._times = [[_NEVER] * total for _ in range(4)]

    def _gates(self, sources: int, own_bytes: Integers) -> list[deque[tuple[int, int]]]:
        """For each destination, (own bytes that must have arrived, message) of what it relays, in order."""
        gates: list[deque[tuple[int, int]]] = [deque() for _ in own_bytes]
        part, parts = self._messages.part.tolist(), self._messages.parts.tolist()
        for message in range(self._direct, len(part)):
            rank = self._sender[message] - sources
            gates[rank].append((int(own_bytes[rank]) * (part[message] + 1) // parts[message], message))
        return [deque(sorted(each)) for each in gates]

    def run(self) -> None:
        """Process all events. Raises RuntimeError if a message is never delivered, which would be a bug here."""
        freed_out, freed_in = set[int](), set[int]()
        for rank in range(len(self._next)):
            self._pack(rank)
        for rank in range(len(self._relays)):
            self._relay(rank, freed_out)
        self._start(freed_out, freed_in)
        steps = (self._packed, self._arrived, self._unpacked)
        while self._heap:
            self._now = self._heap[0][0]
            freed_out, freed_in = set(), set()
            # Process all events of one moment before any departure, so that the result does not depend on their order.
            while self._heap and self._heap[0][0] == self._now:
                _, kind, message = heappop(self._heap)
                self._times[kind][message] = self._now
                self._leave_core(kind, message)
                steps[kind](message, freed_out, freed_in)
            self._start(freed_out, freed_in)
        if left := self._times[_UNPACKED].count(_NEVER):
            raise RuntimeError(f"the replay left {left} of {len(self._sender)} messages behind")

    def _later(self, nanoseconds_: int, kind: int, message: int) -> None:
        """Schedule the end of a task after so many nanoseconds; if it needs a core and none is free, queue it first."""
        node = self._core_of(kind, message)
        if node is not None and not self._nodes.take_core(node, (nanoseconds_, kind, message)):
            return
        heappush(self._heap, (self._now + nanoseconds_, kind, message))

    def _leave_core(self, kind: int, message: int) -> None:
        node = self._core_of(kind, message)
        if node is not None and (waiting := self._nodes.leave_core(node)):
            nanoseconds_, next_kind, next_message = waiting
            heappush(self._heap, (self._now + nanoseconds_, next_kind, next_message))

    def _core_of(self, kind: int, message: int) -> int | None:
        """The node whose core a task needs; None if it needs none."""
        nodes = self._nodes
        if nodes.cores is None:
            return None
        # A NIC transfers without a core, and memory that both ranks have mapped needs no transfer.
        if kind == _ARRIVED and (self._out[message] % len(Path) == Path.NIC or not self._move_ns[message]):
            return None
        if kind == _PACKED and message < self._direct:
            return nodes.of_source[self._sender[message]]
        return nodes.of_destination[self._receiver[message]]

    def _pack(self, source: int) -> None:
        if not self._packing[source] and self._free[source] and self._next[source] < self._end[source]:
            message = self._next[source]
            self._next[source] += 1
            self._free[source] -= 1
            self._packing[source] = True
            self._later(self._pack_ns[message], _PACKED, message)

    def _relay(self, rank: int, freed_out: set[int]) -> None:
        """Make ready the messages that `rank` can relay now."""
        gates = self._relays[rank]
        while gates and gates[0][0] <= self._unpacked_bytes[rank]:
            message = gates.popleft()[1]
            self._times[_PACKED][message] = self._now
            self._ready[self._out[message]][message] = None
            freed_out.add(self._out[message])

    def _packed(self, message: int, freed_out: set[int], _freed_in: set[int]) -> None:
        source = self._sender[message]
        self._packing[source] = False
        self._ready[self._out[message]][message] = None
        freed_out.add(self._out[message])
        self._pack(source)

    def _arrived(self, message: int, freed_out: set[int], freed_in: set[int]) -> None:
        self._out_busy[self._out[message]] = self._in_busy[self._in[message]] = False
        freed_out.add(self._out[message])
        freed_in.add(self._in[message])
        self._to_unpack[self._receiver[message]].append(message)
        self._unpack(self._receiver[message])

    def _unpack(self, rank: int) -> None:
        if not self._unpacking[rank] and self._to_unpack[rank]:
            message = self._to_unpack[rank].popleft()
            self._unpacking[rank] = True
            self._later(self._unpack_ns[message], _UNPACKED, message)

    def _unpacked(self, message: int, freed_out: set[int], freed_in: set[int]) -> None:
        rank = self._receiver[message]
        self._unpacking[rank] = False
        self._unpack(rank)
        if message >= self._direct:
            return
        source = self._sender[message]
        self._free[source] += 1
        self._pack(source)
        self._landing[rank] += 1
        first = self._in[message] // len(Path) * len(Path)
        freed_in.update(range(first, first + len(Path)))  # messages on any path may wait for the bucket
        self._unpacked_bytes[rank] += self._bytes[message]
        self._relay(rank, freed_out)

    def _start(self, freed_out: Iterable[int], freed_in: Iterable[int]) -> None:
        """Start messages that can depart: first those that waited for a receiver's port, then others by port out."""
        for port in sorted(freed_in):
            waiting = self._waiting[port]
            while waiting and not self._in_busy[port]:
                message = waiting.popleft()
                self._is_waiting[message] = False
                # Messages whose port out is busy are considered when it becomes free.
                if message in self._ready[self._out[message]] and not self._out_busy[self._out[message]]:
                    if not self._has_room(message):
                        waiting.appendleft(message)
                        self._is_waiting[message] = True
                        break
                    self._depart(message)
        for port in sorted(freed_out):
            if self._out_busy[port]:
                continue
            for message in self._ready[port]:
                if not self._in_busy[self._in[message]] and self._has_room(message):
                    self._depart(message)
                    break
                if not self._is_waiting[message]:
                    self._is_waiting[message] = True
                    self._waiting[self._in[message]].append(message)

    def _has_room(self, message: int) -> bool:
        return message >= self._direct or self._landing[self._receiver[message]] > 0

    def _depart(self, message: int) -> None:
        del self._ready[self._out[message]][message]
        self._out_busy[self._out[message]] = self._in_busy[self._in[message]] = True
        if message < self._direct:
            self._landing[self._receiver[message]] -= 1
        self._times[_DEPARTED][message] = self._now
        self._later(self._move_ns[message], _ARRIVED, message)

    def record(self) -> Replay:
        """The times of all messages so far."""
        packed, arrived, unpacked, departed = (np.array(times, np.int64) for times in self._times)
        return Replay(self._messages, self._routes, packed, departed, arrived, unpacked)
