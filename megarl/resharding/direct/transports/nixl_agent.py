"""An agent of NIXL: it lets other processes read memory of this one, and reads theirs, without their help.

UCX, below NIXL, takes the best way that it finds between two processes: InfiniBand or RoCE, with GPUDirect where the
memory is a GPU's; memory of the host between processes of one; else TCP.
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
"""Advice where there is no NIXL."""
_PACKAGES = ("nixl_cu12", "nixl_cu13")

# An operator's own UCX_TCP_TX_SEG_SIZE wins. At UCX's 8 KiB a read over TCP moves half as many bytes a second.
_UCX = ("TCP_TX_SEG_SIZE=512k", "TCP_RX_SEG_SIZE=512k")
# A card of mlx5 that gets short answers inline (64 bytes, UCX 1.23) reads no fewer than 65, and below that UCX has but
# software for memory of a GPU. Changes of a norm are fewer.
_BY_HARDWARE = ("PROTO_EMULATION_ENABLE=n", "IB_TX_INLINE_RESP=0")
_PROGRESS_US = 10_000
_POLL_S = 1e-4
_CHECK_S = 0.1
_DRAIN_S = 2.0
"""The time in which reads have to end before their agent is closed: those of ranks that live mostly take milliseconds,
and those of a machine that is gone, over InfiniBand, eight seconds.
"""


@dataclass(frozen=True)
class RemoteMemory:
    """Everything an agent has to know to read regions of another agent's memory.

    `index` is the number of the GPU if `kind` is cuda.

    Example: `RemoteMemory(b"...", "cpu", 0, (140245101125632,))`.
    """

    metadata: bytes
    kind: str
    index: int
    addresses: Sequence[int]


def is_installed() -> bool:
    """Whether a package of NIXL is here."""
    return _package() is not None


def has_port(root: Path = Path("/")) -> bool:
    """Whether this process may use a port of InfiniBand, RoCE or EFA that is up; UCX has memory and sockets else."""
    return bool(active_ports(root))


def check_installed() -> None:
    """Raise UserError if no package of NIXL is here."""
    if not is_installed():
        raise UserError(
            f"refit.transport=rdma needs NIXL, which is not installed for {sys.executable}: {INSTALL}, or set"
            " refit.transport to auto or tcp"
        )


class NixlAgent:
    """An agent; `name` is unique among its peers'. After a `close` that succeeds nothing reads or writes its memory.

    One that `is_read` has a thread of NIXL's, which answers where the way is not one-sided by itself, as sockets are,
    and sleeps while nothing happens. One that only reads does all in the calls of its methods.

    Where no network card and no other way reaches memory by itself, UCX copies it in software, over sockets or not:
    many times slower, with nothing said. With `by_hardware` such a read fails, unless UCX_PROTO_EMULATION_ENABLE=y.
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
        """Let others read `regions`, and let own reads go there: contiguous tensors on one device, which stay alive."""
        first = regions[0]
        index = max(first.get_device(), 0)
        described = [(region.data_ptr(), region.numel() * region.element_size(), index, "") for region in regions]
        # A region that is there twice ends the process (1.5) when it is registered no more.
        registration = self._nixl.nixlRegDList(self._kind(first.device.type), list(dict.fromkeys(described)))
        with self._errors(f"registering memory of {first.device} for RDMA (ulimit -l)"):
            self._agent.registerMem(registration)
        self._registered.append(registration)
        return RemoteMemory(self._agent.getLocalMD(), first.device.type, index, [each[0] for each in described])

    def add(self, memory: RemoteMemory, peer: str) -> str:
        """Get to know the agent of `peer`; its name, for reads."""
        with self._errors(f"connecting with {peer}"):
            name = self._agent.loadRemoteMD(memory.metadata).decode()
        self._peers.append(name)
        return name

    def begin_reads(self, reads: Sequence[tuple[Tensor, int]], memory: RemoteMemory, name: str, peer: str) -> "Read":
        """Begin to fill contiguous tensors, each from an address in registered memory of the agent, all in one read."""
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
        """Wait for a read. Raises TransferError if it failed, or is not done within the time, and what `check` raises.

        It is called now and then, for news that make the wait vain.
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
        """End all connections, and let nobody read any more; False if a read of its own goes on, and with it all else.

        This agent and the memory that it reads into have to stay then, until it is closed again. NIXL (1.5) does not
        end what is under way: it frees what the read still needs, and that UCX uses it afterwards ends the process; the
        other one, too, where UCX sends replies, as it does over sockets.
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
        # The end of the agent is that of its thread.
        self._agent = None
        return True

    def _drain(self) -> bool:
        """Wait for a short time until no read is under way, however reads end; whether that came to be."""
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
    """A read that has begun."""

    agent: NixlAgent
    handle: int
    peer: str
    is_done: bool = False

    def finish(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """See `NixlAgent.finish`."""
        self.agent.finish(self, timeout_s, check)


def _create_agent(nixl: ModuleType, name: str, ucx: Sequence[str], *, with_thread: bool) -> Any:
    """An agent whose thread, if it has one, sleeps until UCX has something to do.

    The thread of an agent that `nixl_agent` of nixl 1.5 makes asks UCX without a pause, at the cost of a core of every
    rank, since it sets `pthrDelay` to 0 and has no argument for it: hence the classes below it. In microseconds, it is
    how long the thread sleeps where no event of UCX's wakes it.
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
    """The package for torch's CUDA, where there are several."""
    ending = f"_cu{device.cuda_version().partition('.')[0]}"
    found = [package for package in _PACKAGES if find_spec(package)]
    return next((package for package in found if package.endswith(ending)), found[0] if found else None)


@cache
def _error_types(nixl: ModuleType) -> tuple[type[Exception], ...]:
    return tuple(each for each in vars(nixl).values() if isinstance(each, type) and issubclass(each, Exception))
