"""An agent of NIXL: lets other processes read this one's memory, and reads theirs, without the other CPU's help.

UCX, below NIXL, picks the best path between two processes: InfiniBand or RoCE, with GPUDirect for GPU memory; shared
memory on one host; else TCP.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from converters.errors import UserError
from megarl.process.rdma_devices import active_ports
from megarl.resharding.direct.connections import TransferError
from megatron_ext import device

INSTALL = "pip install nixl-cu12, or nixl-cu13 beside a torch for CUDA 13"
"""How to install NIXL, for error messages."""
_PACKAGES = ("nixl_cu12", "nixl_cu13")

# The operator's own UCX_TCP_TX_SEG_SIZE takes precedence. UCX's default of 8 KiB halves the throughput of reads over
# TCP.
_UCX = ("TCP_TX_SEG_SIZE=512k", "TCP_RX_SEG_SIZE=512k")
# With inline responses (64 bytes by default, UCX 1.23), mlx5 cards only do reads of at least 65 bytes, and for shorter
# reads of GPU memory UCX has only the software path. The changes of a norm can be shorter.
_BY_HARDWARE = ("PROTO_EMULATION_ENABLE=n", "IB_TX_INLINE_RESP=0")
_PROGRESS_US = 10_000
_POLL_S = 1e-4
_CHECK_S = 0.1
_DRAIN_S = 2.0
"""How long `close` waits for reads in flight. Reads from live ranks mostly take milliseconds; reads from a dead machine
over InfiniBand take eight seconds to fail.
"""


@dataclass(frozen=True)
class RemoteMemory:
    """Everything an agent needs to read regions of another agent's memory.

    `index` is the GPU's index if `kind` is cuda.

    Example: `RemoteMemory(b"...", "cpu", 0, (140245101125632,))`.
    """

    metadata: bytes
    kind: str
    index: int
    addresses: Sequence[int]


def is_installed() -> bool:
    """Whether a NIXL package is installed."""
    return _package() is not None


def has_port(root: Path = Path("/")) -> bool:
    """Whether this process can use an InfiniBand, RoCE or EFA port that is up.

    Without one UCX has only shared memory and sockets.
    """
    return bool(active_ports(root))


def check_installed() -> None:
    """Raise UserError if no NIXL package is installed."""
    if not is_installed():
        raise UserError(
            f"refit.transport=rdma needs NIXL, which is not installed for {sys.executable}: {INSTALL}, or set"
            " refit.transport to auto or tcp"
        )


class NixlAgent:
    """An agent; `name` must be unique among its peers. After a successful `close` nothing reads or writes its memory.

    With `is_read` it has a NIXL progress thread, which answers reads over paths that are not one-sided, such as
    sockets, and sleeps when idle. An agent that only reads makes progress inside its method calls.

    If no network card or other path can access the memory directly, UCX silently emulates the read in software, which
    is many times slower. With `by_hardware` such a read fails, unless UCX_PROTO_EMULATION_ENABLE=y.
    """

    def __init__(self, name: str, *, is_read: bool, by_hardware: bool = False) -> None:
        check_installed()
        self._nixl = _bindings()
        ucx = (*_UCX, *_BY_HARDWARE) if by_hardware else _UCX
        with self._errors("starting NIXL (variables of UCX)"):
            self._agent = _create_agent(self._nixl, name, ucx, with_thread=is_read)
        self._registered: list[Any] = []
        self._peers: list[str] = []
        self._reads: list[Read] = []

    def register(self, regions: Sequence[Tensor]) -> RemoteMemory:
        """Register `regions`, contiguous tensors on one device, for reads by peers and as targets of own reads.

        The caller keeps them alive.
        """
        first = regions[0]
        index = max(first.get_device(), 0)
        described = [(region.data_ptr(), region.numel() * region.element_size(), index, "") for region in regions]
        # Deduplicated: NIXL 1.5 crashes the process when a region that was registered twice is deregistered.
        registration = self._nixl.nixlRegDList(self._kind(first.device.type), list(dict.fromkeys(described)))
        with self._errors(f"registering memory of {first.device} for RDMA (ulimit -l)"):
            self._agent.registerMem(registration)
        self._registered.append(registration)
        return RemoteMemory(self._agent.getLocalMD(), first.device.type, index, [each[0] for each in described])

    def add(self, memory: RemoteMemory, peer: str) -> str:
        """Add the agent of `peer`. Returns the agent's name, for reads."""
        with self._errors(f"connecting with {peer}"):
            name = self._agent.loadRemoteMD(memory.metadata).decode()
        self._peers.append(name)
        return name

    def begin_reads(self, reads: Sequence[tuple[Tensor, int]], memory: RemoteMemory, name: str, peer: str) -> "Read":
        """Begin one read that fills contiguous tensors, each from an address in the other agent's registered memory."""
        own = [(into.data_ptr(), into.nbytes, max(into.get_device(), 0)) for into, _ in reads]
        remote = [(address, into.nbytes, memory.index) for into, address in reads]
        nixl = self._nixl
        with self._errors(f"reading from {peer}"):
            handle = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(self._kind(reads[0][0].device.type), own),
                nixl.nixlXferDList(self._kind(memory.kind), remote),
                name,
            )
        read = Read(self, handle, peer)
        self._reads.append(read)
        read.is_done = self._is_done(read, self._agent.postXferReq)
        return read

    def finish(self, read: "Read", timeout_s: float, check: Callable[[], None]) -> None:
        """Wait for a read.

        Raises TransferError if it failed or takes longer than `timeout_s`, and whatever `check` raises. `check` is
        called regularly, to learn of events that make waiting pointless.
        """
        now = time.monotonic()
        deadline, next_check = now + timeout_s, now + _CHECK_S
        while not read.is_done:
            now = time.monotonic()
            if now > deadline:
                raise TransferError(f"{read.peer} let nothing be read for {timeout_s:g} s (refit.timeout_s)")
            if now > next_check:
                check()
                next_check = now + _CHECK_S
            time.sleep(_POLL_S)
            read.is_done = self._is_done(read, self._agent.getXferStatus)
        self._reads.remove(read)
        self._agent.releaseXferReq(read.handle)

    def close(self) -> bool:
        """Close all connections and deregister all memory.

        Returns False, and leaves all as it is, if own reads are in flight. This agent and the memory that it reads into
        must then be kept until it is closed again. NIXL (1.5) does not cancel a read in flight: it frees what the read
        still needs, and UCX's use after free crashes the process. It crashes the peer, too, on paths where UCX sends
        replies, such as sockets.
        """
        if self._agent is None:
            return True
        if not self._drain():
            return False
        for read in self._reads:
            self._agent.releaseXferReq(read.handle)
        for name in self._peers:
            self._agent.invalidateRemoteMD(name)
        for registration in self._registered:
            self._agent.deregisterMem(registration)
        self._reads, self._peers, self._registered = [], [], []
        # Destroying the agent ends its thread.
        self._agent = None
        return True

    def _drain(self) -> bool:
        """Wait at most `_DRAIN_S` until no read is in flight; failed reads count as ended.

        Returns whether that is so.
        """
        deadline = time.monotonic() + _DRAIN_S
        while not all(map(self._is_over, self._reads)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _is_over(self, read: "Read") -> bool:
        try:
            read.is_done = read.is_done or self._is_done(read, self._agent.getXferStatus)
        except TransferError:
            return True
        return read.is_done

    def _is_done(self, read: "Read", ask: Any) -> bool:
        with self._errors(f"reading from {read.peer}"):
            return bool(ask(read.handle) == self._nixl.NIXL_SUCCESS)

    def _kind(self, device_type: str) -> Any:
        return self._nixl.DRAM_SEG if device_type == "cpu" else self._nixl.VRAM_SEG

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except _error_types(self._nixl) as error:
            raise TransferError(f"{action} failed: {error}") from error


@dataclass(eq=False)
class Read:
    """A read in flight."""

    agent: NixlAgent
    handle: int
    peer: str
    is_done: bool = False

    def finish(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """See `NixlAgent.finish`."""
        self.agent.finish(self, timeout_s, check)


def _create_agent(nixl: ModuleType, name: str, ucx: Sequence[str], *, with_thread: bool) -> Any:
    """Create an agent whose thread, if it has one, sleeps until UCX has something to do.

    Uses NIXL's low-level classes because `nixl_agent` of nixl 1.5 sets `pthrDelay` to 0 and has no argument for it: its
    thread polls UCX without a pause, which costs every rank a core. `pthrDelay` is how long, in microseconds, the
    thread sleeps if no UCX event wakes it.
    """
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = with_thread, _PROGRESS_US
    agent = nixl.nixlAgent(name, config)
    agent.createBackend("UCX", {"engine_config": ",".join(ucx)})
    return agent


@cache
def _bindings() -> ModuleType:
    return import_module(f"{_package()}._bindings")


def _package() -> str | None:
    """The installed NIXL package, preferably the one for torch's CUDA; None if there is none."""
    ending = f"_cu{device.cuda_version().partition('.')[0]}"
    found = [package for package in _PACKAGES if find_spec(package)]
    return next((package for package in found if package.endswith(ending)), found[0] if found else None)


@cache
def _error_types(nixl: ModuleType) -> tuple[type[Exception], ...]:
    return tuple(each for each in vars(nixl).values() if isinstance(each, type) and issubclass(each, Exception))
