"""The rates that a forecast of refits needs, measured separately: packing, unpacking and moving a contiguous tensor.

Every core has a process, and all work at the same time, since they share memory bandwidth. There is no plan, there are
no pieces, and no rank waits for another: the forecast has to predict how these combine.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from converters.boxes import Box
from converters.number_formats import FP8_BLOCK
from megarl.resharding.direct.messages import cut_into_messages
from megarl.resharding.direct.messages_by_peer import MessageId
from megarl.resharding.direct.packing import blocks, pack, unpack
from megarl.resharding.direct.receiver import Receiver
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import BUCKETS, RecvEndpoint, Rendezvous, SendEndpoint
from megarl.resharding.direct.typed_transfers import Scales, TypedTransfer
from megarl.resharding.shared_memory import Segment, map_segment
from megatron_ext.loopback import LOOPBACK, open_store
from resharding.contenders.nixl_read import ways
from resharding.processes import DEADLINE_S, Place, Ranks, hear, say

_ROWS, _COLUMNS = 32_768, 2048
"""Shape of a process's tensor, 134 MB in bfloat16: much larger than caches."""
_ROW_BYTES = 768
"""Bytes of a row, with gaps of the same size between rows: how engines split the experts' second matrices."""
_SMALL_MESSAGES, _SMALL_ELEMENTS = 32, 128
_VERSION = 1


@dataclass(frozen=True)
class CoreRates:
    """Bytes per second that a core packs and unpacks while all cores do; bytes of codes if it quantises."""

    pack: float
    pack_rows: float
    """The same for rows with gaps between them, as in the other fields with this suffix."""
    quantise: float
    quantise_rows: float
    unpack: float
    unpack_rows: float
    checksum: float
    """Checksums only, at either end, for data that bypass the buckets."""


@dataclass(frozen=True)
class WayCosts:
    """CPU seconds of a transport."""

    of_byte_sent: float
    """Cost per byte for its sender; 0 through mapped memory."""
    of_byte_received: float
    of_message: float
    """Cost per message for its sender, and again for its receiver, with cold caches."""


def core_rates(ranks: Ranks) -> CoreRates:
    """Measure the rates in the processes of `Worker`s."""
    elements = _ROWS * _COLUMNS * len(ranks.held()) // 2

    def rate(nbytes: int, method: str, what: str) -> float:
        # CPU seconds, on which other processes of the machine have little effect.
        return nbytes / ranks.time(method, what).cpu_seconds

    return CoreRates(
        pack=rate(2 * elements, "pack", "plain"),
        pack_rows=rate(elements, "pack", "rows"),
        quantise=rate(elements, "pack", "quantised"),
        quantise_rows=rate(elements // 2, "pack", "quantised rows"),
        unpack=rate(2 * elements, "unpack", "plain"),
        unpack_rows=rate(elements, "unpack", "rows"),
        checksum=rate(2 * elements, "unpack", "zero_copy"),
    )


def way_costs(ranks: Ranks, transport: str, ucx_tls: str) -> WayCosts:
    """Measure the costs in the processes of `Worker`s connected by this transport."""
    pairs = len(ranks.held()) // 2
    by_rank = ranks.time("move", transport, ucx_tls).cpu_seconds_by_rank
    moved = 0 if transport == "shared_memory" else 1 / sum(ranks.call("moved_bytes"))
    small = ranks.time("send_small", transport, ucx_tls).cpu_seconds - sum(ranks.call("copying_seconds"))
    sent, received = sum(by_rank[:pairs]) * moved, sum(by_rank[pairs:]) * moved
    return WayCosts(sent, received, small / (2 * pairs * _SMALL_MESSAGES))


class Worker:
    """A process: the first half are sources, one per core; each of the others is the destination of one source."""

    def __init__(self, place: Place, bucket_bytes: int) -> None:
        self._half = half = place.ranks // 2
        self._is_source, self._pair = place.rank < half, place.rank % half
        self._pipe = place.pipes[(place.rank + half) % place.ranks]
        self._bucket_bytes, self._messages = bucket_bytes, -(-_ROWS * _COLUMNS * 2 // bucket_bytes)
        self._tensors = {
            "weight": torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16).normal_(0, 0.02),
            "rows": torch.empty(_ROWS * _COLUMNS // _ROW_BYTES, _ROW_BYTES, dtype=torch.bfloat16).normal_(0, 0.02),
            "codes": torch.zeros(_ROWS, _COLUMNS, dtype=FP8_BLOCK.codes),
            "scales": torch.ones(_ROWS // 128, _COLUMNS // 128, dtype=FP8_BLOCK.scales),
            "scales of rows": torch.ones(_ROWS * _COLUMNS // _ROW_BYTES // 128 + 1, _ROW_BYTES // 256),
        }
        self._buckets = self._mapped(bucket_bytes)
        self._blocks = {name: self._views(typed_transfer) for name, typed_transfer in typed_transfers().items()}
        self._blocks["zero_copy"] = self._views(typed_transfers()["plain"], is_zero_copy=True)
        self._endpoints: dict[tuple[str, str], SendEndpoint | RecvEndpoint] = {}
        self._small: dict[tuple[str, str], Sender | Receiver] = {}
        self._stores: list[Any] = []
        self._copying_s = 0.0

    def pack(self, what: str) -> None:
        """Pack the tensor, if this is a source."""
        if self._is_source:
            for message in self._blocks[what]:
                pack(message, with_checksum=True)

    def unpack(self, what: str) -> None:
        """Unpack as many bytes as the tensor has, if this is a destination."""
        if not self._is_source:
            for message in self._blocks[what]:
                unpack(message, with_checksum=True)

    def open(self, transport: str, ucx_tls: str) -> None:
        """Connect by a transport, for `move` and `send_small`."""
        rendezvous = self._rendezvous(transport, None)
        made, arguments = TRANSPORTS[transport], (rendezvous, self._pair, self._bucket_bytes)
        endpoint: Any
        with ways(ucx_tls):
            if self._is_source:
                endpoint = made.send_endpoint(*arguments)
                self._pipe.send(endpoint.offer(self._pair))
                hear(self._pipe)
            else:
                endpoint = made.recv_endpoint(*arguments, lambda: None)
                endpoint.connect(self._pair, self._pipe.recv())
                endpoint.all_connected()
                say(self._pipe)
        self._endpoints[transport, ucx_tls] = endpoint
        tensors = {"small": torch.zeros(_SMALL_ELEMENTS, dtype=torch.bfloat16)}
        box = Box.whole((_SMALL_ELEMENTS,))
        one = cut_into_messages([TypedTransfer("small", box, "small", box, torch.bfloat16)], self._bucket_bytes)
        messages = {self._pair: one * _SMALL_MESSAGES}
        if self._is_source:
            sender = Sender(self._pair, messages, tensors, LOOPBACK)
            rendezvous = self._rendezvous(transport, sender)
            with ways(ucx_tls):
                sender.connect(rendezvous)
            self._small[transport, ucx_tls] = sender
        else:
            receiver = Receiver(self._pair, messages, tensors, self._rendezvous(transport, None), self._copy)
            with ways(ucx_tls):
                receiver.connect()
            self._small[transport, ucx_tls] = receiver

    def move(self, transport: str, ucx_tls: str) -> None:
        """Move as many bytes as the tensor has from bucket to bucket, without packing."""
        endpoint: Any = self._endpoints[transport, ucx_tls]
        for number in range(self._messages):
            bucket = number % BUCKETS
            if self._is_source:
                if number >= BUCKETS:
                    hear(self._pipe)
                endpoint.push(bucket, self._bucket_bytes, self._pair)
                say(self._pipe)
            else:
                hear(self._pipe)
                endpoint.pull(self._pair, bucket, self._bucket_bytes)()
                say(self._pipe)
        if self._is_source:
            for _ in range(min(BUCKETS, self._messages)):
                hear(self._pipe)

    def moved_bytes(self) -> int:
        """Bytes moved by `move`, on a source."""
        return self._messages * self._bucket_bytes if self._is_source else 0

    def send_small(self, transport: str, ucx_tls: str) -> None:
        """Send messages of a few bytes; before each, the sender and then the receiver copy a bucket of other data."""
        small, self._copying_s = self._small[transport, ucx_tls], 0.0
        if isinstance(small, Sender):
            small.send_as_ready(_VERSION, self._copied)
        else:
            small.receive(_VERSION)

    def copying_seconds(self) -> float:
        """Seconds that the last `send_small` spent on copying."""
        return self._copying_s

    def _copied(self, messages: Iterable[MessageId]) -> Iterator[MessageId]:
        for message in messages:
            self._copy()
            yield message

    def _copy(self, *_taken: object) -> None:
        begun = time.thread_time()
        words = self._tensors["weight"].view(-1).view(torch.int64)[: self._bucket_bytes // 8]
        self._buckets[0].view(torch.int64).copy_(words)
        self._copying_s += time.thread_time() - begun

    def _views(self, typed_transfer: TypedTransfer, *, is_zero_copy: bool = False) -> list[Any]:
        end: Literal["source", "destination"] = "source" if self._is_source else "destination"
        messages = cut_into_messages([typed_transfer], self._bucket_bytes)
        return [
            blocks(message, self._buckets[number % BUCKETS], self._tensors, end, (0,) if is_zero_copy else ())
            for number, message in enumerate(messages)
        ]

    def _mapped(self, bucket_bytes: int) -> list[Tensor]:
        if not self._is_source:
            mapped = [map_segment(handle, bucket_bytes) for handle in self._pipe.recv()]
            say(self._pipe)
            return mapped
        segments = [Segment(bucket_bytes) for _ in range(BUCKETS)]
        self._pipe.send([segment.handle() for segment in segments])
        hear(self._pipe)
        for segment in segments:
            segment.close()
        return [segment.memory for segment in segments]

    def _rendezvous(self, transport: str, sender: Sender | None) -> Rendezvous:
        port = None
        if TRANSPORTS[transport].needs_store and self._is_source and not self._pair:
            self._stores.append(open_store(LOOPBACK, timedelta(seconds=DEADLINE_S)))
            port = self._stores[-1].port
        said: list[Any] = [None] * (2 * self._half)
        dist.all_gather_object(said, (secrets.token_bytes(16), port, sender and sender.address))
        key, port, _ = said[0]
        listeners = [address or ("", 0) for *_, address in said[: self._half]]
        return Rendezvous(transport, key, listeners, (LOOPBACK, port) if port else None, self._half, DEADLINE_S)


def typed_transfers() -> dict[str, TypedTransfer]:
    """The packed and unpacked tensors, each as one typed transfer."""
    whole = Box.whole((_ROWS, _COLUMNS))
    plain = TypedTransfer("weight", whole, "weight", whole, torch.bfloat16)
    scales = Scales("scales", FP8_BLOCK.scales_box(whole), FP8_BLOCK.name)
    codes = replace(plain, destination_name="codes", dtype=FP8_BLOCK.codes, scales=scales)
    half = Box((0, 0), (_ROWS * _COLUMNS // _ROW_BYTES, _ROW_BYTES // 2))
    rows = TypedTransfer("rows", half, "rows", half, torch.bfloat16)
    # Its codes are rows with gaps, too.
    codes_of_rows = replace(codes, source_name="rows", source_box=half, destination_name="rows", destination_box=half)
    half_scales = Scales("scales of rows", FP8_BLOCK.scales_box(half), FP8_BLOCK.name)
    return {
        "plain": plain,
        "rows": rows,
        "quantised": codes,
        "quantised rows": replace(codes_of_rows, scales=half_scales),
    }
