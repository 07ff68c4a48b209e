"""The lower bound of one-sided reads: the same bytes between the same processes, but only read, by NIXL alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megarl.resharding.direct.transports.endpoint import BUCKETS
from megarl.resharding.direct.transports.nixl_agent import NixlAgent, Read, RemoteMemory
from megarl.resharding.kernels import Block, gather
from resharding.contenders.memcpy import byte_of, cuts
from resharding.party import Party
from resharding.processes import DEADLINE_S, hear, say

SOCKETS = "tcp,self"
"""UCX transports: only sockets, as between machines without InfiniBand."""


class NixlRead:
    """Workers read one contiguous buffer per pair of ranks, message by message, two at a time.

    There is no plan, nothing is packed, and nothing is signalled. With checksums both ends compute those of all
    messages, a worker as soon as a message has arrived; they are not compared.
    """

    def __init__(self, party: Party, ucx_tls: str = "", *, with_checksum: bool = False) -> None:
        self._with_checksum = with_checksum
        derive = party.scenario.outgoing if party.is_source else party.scenario.incoming
        first = party.sources if party.is_source else 0
        messages = derive(party.layout("engine"), party.number)
        self._cuts = {first + peer: list(cuts([each.size_bytes for each in found])) for peer, found in messages.items()}
        self._memory = {
            peer: torch.full((found[-1].stop,), byte_of(party.place.rank), dtype=torch.uint8)
            for peer, found in self._cuts.items()
        }
        moved = sum(len(memory) for memory in self._memory.values())
        self.moved_bytes = moved if party.is_source else 0
        self._pipes, self._is_source = party.place.pipes, party.is_source
        with ways(ucx_tls):
            self._agent = NixlAgent(f"bare {party.place.rank}", is_read=party.is_source)
        peers = list(self._memory)
        registered = self._agent.register([self._memory[peer] for peer in peers])
        said = party.exchange((registered, {peer: number for number, peer in enumerate(peers)}))
        self._offers: dict[int, tuple[RemoteMemory, int, str]] = {}
        if not self._is_source:
            for peer in peers:
                memory, region_for = said[peer]
                self._offers[peer] = memory, region_for[party.place.rank], self._agent.add(memory, f"rank {peer}")
        party.exchange(None)

    def run(self) -> None:
        """Read, or wait until all have read."""
        if self._is_source:
            for peer, cut in self._in_turns():
                self._check(self._memory[peer][cut])
            for peer in self._cuts:
                hear(self._pipes[peer])
            return
        reads: list[tuple[Read, Tensor]] = []
        for peer, cut in self._in_turns():
            memory, region, name = self._offers[peer]
            into = self._memory[peer][cut]
            address = memory.addresses[region] + cut.start
            read = self._agent.begin_reads([(into, address)], memory, name, f"rank {peer}")
            reads.append((read, into))
            if len(reads) == BUCKETS:
                self._finish(*reads.pop(0))
        for read, into in reads:
            self._finish(read, into)
        for peer in self._cuts:
            say(self._pipes[peer])

    def wipe(self) -> None:
        """Overwrite what was written."""
        if not self._is_source:
            for memory in self._memory.values():
                memory.fill_(0)

    def wrong(self) -> list[str]:
        """The sources whose bytes arrived wrong."""
        if self._is_source:
            return []
        return [f"bytes of rank {peer}" for peer, memory in self._memory.items() if not _is_all(memory, byte_of(peer))]

    def _finish(self, read: Read, into: Tensor) -> None:
        read.finish(DEADLINE_S)
        self._check(into)

    def _check(self, memory: Tensor) -> None:
        if self._with_checksum:
            gather(Block(memory, [], [], []), 0)

    def _in_turns(self) -> Iterator[tuple[int, slice]]:
        for number in range(max(map(len, self._cuts.values()))):
            for peer, found in self._cuts.items():
                if number < len(found):
                    yield peer, found[number]


def _is_all(memory: Tensor, value: int) -> bool:
    return bool((memory == value).all())


@contextmanager
def ways(ucx_tls: str) -> Iterator[None]:
    """Within the context, new agents use these UCX transports; all transports if the text is empty."""
    before = os.environ.get("UCX_TLS")
    if ucx_tls:
        os.environ["UCX_TLS"] = ucx_tls
    try:
        yield
    finally:
        os.environ.pop("UCX_TLS", None)
        if before is not None:
            os.environ["UCX_TLS"] = before
