"""Measures one node for the cluster check: versions, matrix products, connections, folders."""

import os
import platform
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.ray.network_environment import look_at
from megarl.doctor.compilers import Compilers, compilers_here
from megarl.doctor.inventory import PACKAGES, installed_version, shared_memory_bytes
from megarl.doctor.limits import Limits, limits_here
from megarl.process.gpudirect import gpudirect_obstacle
from megarl.process.raised_limits import raise_limits
from megarl.process.rdma_devices import RdmaPort, has_verbs, ports_obstacle

if TYPE_CHECKING:
    import torch

_CPU_SIZE, _GPU_SIZE = 1024, 8192
"""Rows and columns of the matrices."""
_PRODUCTS = 20
_LARGEST = 8
"""Elements are integers up to this size: every sum is exact in float32, so any difference is an error."""
_ROUNDING = 2.0**-6
"""Above the relative error of bfloat16, 2^-8, also where a library adds parts that were rounded before."""
_PING_BYTES = 8
_PINGS = 20
_TRANSFER_BYTES = 32 * 1024**2
_TRANSFER_S = 1.0
"""At most this long: a slow node has hundreds of links, each measured several times."""
_CHUNK_BYTES = 1024**2
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Compute:
    """Result of matrix products on a GPU or the CPU."""

    device: str
    """Such as cuda:3, or cpu."""
    name: str
    free_memory_bytes: int
    memory_bytes: int
    tflops: float
    is_right: bool
    failure: str = ""
    """Why it cannot compute."""


@dataclass(frozen=True)
class Node:
    """Description and measurements of a node."""

    name: str
    address: str
    versions: dict[str, str | None]
    compute: list[Compute]
    """Empty if the node is partly in use."""
    ports: tuple[RdmaPort, ...]
    """InfiniBand or RoCE ports that are up."""
    clock_offset_s: float = 0.0
    """Seconds by which its clock is ahead of the checking node's, accurate to half the duration of a call."""
    unseen_folders: tuple[str, ...] = ()
    """Folders in which it does not find what another node wrote."""
    unseen_inputs: tuple[str, ...] = ()
    """Files and folders that a run reads, but that are missing on this node."""
    limits: Limits = field(default_factory=Limits)
    """Limits of a process started there by Ray."""
    has_verbs: bool = True
    """Whether libibverbs is installed, through which NCCL uses `ports`."""
    ports_obstacle: str = ""
    """Why there are no `ports` although the kernel has devices."""
    gpudirect_obstacle: str = ""
    """Why `ports` cannot access GPU memory directly, as far as the kernel shows it."""
    compilers: Compilers = field(default_factory=Compilers)
    shared_memory_bytes: int | None = None
    """Free space in /dev/shm; None if unknown."""

    @property
    def has_gpus(self) -> bool:
        """Whether a GPU was measured."""
        return any(each.device != "cpu" for each in self.compute)


@dataclass(frozen=True)
class Link:
    """The link from one node to another, measured over a socket at the addresses and ports that refits use."""

    sender: str
    receiver: str
    gbyte_per_s: float
    latency_s: float
    """Round-trip time of a message."""
    failure: str = ""
    """Why no connection could be made."""


class NodeProbe:
    """An actor that measures its node."""

    def __init__(self, address: str) -> None:
        # As in every process of a run.
        raise_limits()
        self._address = address
        self._listener: socket.socket | None = None

    def name(self) -> str:
        """The node's name in Slurm, or its host name."""
        return os.environ.get("SLURMD_NODENAME", socket.gethostname())

    def look(self, *, is_free: bool, gpus: int) -> Node:
        """Describe the node, which has `gpus` for Ray; matrix products are only measured if it `is_free`."""
        network = look_at(self._address)
        versions = {name: installed_version(name) for name in PACKAGES} | {"Python": platform.python_version()}
        return Node(
            self.name(),
            self._address,
            versions,
            _multiply(gpus) if is_free else [],
            () if network is None else network.ports,
            limits=limits_here(),
            has_verbs=has_verbs(),
            ports_obstacle=ports_obstacle(),
            gpudirect_obstacle=gpudirect_obstacle(),
            compilers=compilers_here(),
            shared_memory_bytes=shared_memory_bytes(),
        )

    def clock(self) -> float:
        """Time of its clock, in seconds since 1970."""
        return time.time()

    def write(self, folder: str, name: str) -> str:
        """Write a file into a folder; return the error, or an empty text."""
        try:
            Path(folder, name).write_text(name)
        except OSError as error:
            return str(error)
        return ""

    def sees(self, folder: str, name: str) -> bool:
        """Whether the file appears within 10 s: a network file system may take seconds to show it."""
        deadline = time.monotonic() + 10
        path = Path(folder, name)
        while not path.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return path.read_text() == name

    def unseen(self, paths: list[str]) -> tuple[str, ...]:
        """The files and folders that do not exist."""
        return tuple(path for path in paths if not Path(path).exists())

    def remove(self, folder: str, name: str) -> None:
        """Remove the file."""
        Path(folder, name).unlink(missing_ok=True)

    def listen(self) -> tuple[str, int]:
        """Start listening at this address for one connection, which `receive` serves."""
        self._listener = socket.create_server((self._address, 0))
        self._listener.settimeout(_TIMEOUT_S)
        return self._listener.getsockname()

    def receive(self) -> None:
        """Accept the connection and answer what `send` sends."""
        assert self._listener is not None
        with self._listener, self._listener.accept()[0] as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                connection.sendall(_read(connection, _PING_BYTES))
            while connection.recv(_CHUNK_BYTES):
                pass
            connection.sendall(bytes(_PING_BYTES))

    def send(self, address: tuple[str, int], names: tuple[str, str]) -> Link:
        """Measure the link to a node that listens."""
        try:
            with socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                latency_s = statistics.median(_ping(connection) for _ in range(_PINGS))
                began, sent = time.perf_counter(), 0
                chunk = bytes(_CHUNK_BYTES)
                while sent < _TRANSFER_BYTES and time.perf_counter() < began + _TRANSFER_S:
                    connection.sendall(chunk)
                    sent += len(chunk)
                connection.shutdown(socket.SHUT_WR)
                _read(connection, _PING_BYTES)
                took_s = time.perf_counter() - began
        except OSError as error:
            return Link(*names, 0.0, 0.0, f"{address[0]}:{address[1]}: {error}")
        return Link(*names, sent / took_s / 1e9, latency_s)


def _ping(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(bytes(_PING_BYTES))
    _read(connection, _PING_BYTES)
    return time.perf_counter() - began


def _read(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, _CHUNK_BYTES))
        if not part:
            raise ConnectionError("the other side closed the connection")
        count -= len(part)
        parts.append(part)
    return b"".join(parts)


def _multiply(gpus: int) -> list[Compute]:
    """Measure all devices; of the node's `gpus`, those that torch cannot use fail with its reason."""
    import torch

    kind = torch.accelerator.current_accelerator()
    if not torch.accelerator.is_available():
        # torch also says so if the driver is too old, or NVSwitch's fabric manager does not run.
        return [_multiply_on(kind or torch.device("cuda" if gpus else "cpu"))]
    assert kind is not None
    count = max(torch.accelerator.device_count(), gpus)
    return [_multiply_on(torch.device(kind.type, index)) for index in range(count)]


def _multiply_on(device: "torch.device") -> Compute:
    """Measure a device; if it is broken or full, `failure` holds torch's message."""
    try:
        return _measure_products(device)
    # The second is that of a torch without CUDA.
    except (RuntimeError, AssertionError) as error:
        return Compute(str(device), _name_of(device), 0, 0, 0.0, is_right=False, failure=first_line(error))


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _name_of(device: "torch.device") -> str:
    import torch

    if device.type == "cpu":
        return platform.machine()
    try:
        return torch.get_device_module(device).get_device_name(device)
    except (RuntimeError, AssertionError):
        return "unknown"


def _measure_products(device: "torch.device") -> Compute:
    import psutil
    import torch

    is_cpu = device.type == "cpu"
    size, dtype = (_CPU_SIZE, torch.float32) if is_cpu else (_GPU_SIZE, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(0, _LARGEST + 1, (size, size), generator=generator) for _ in range(2))
    fast = left.to(device, dtype), right.to(device, dtype)
    product, times = fast[0] @ fast[1], []
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        product = fast[0] @ fast[1]
        if not is_cpu:
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    # The row sums of the product, computed here in another order.
    expected = left.double() @ right.double().sum(1)
    exact = left.to(device, torch.float32) @ right.to(device, torch.float32)
    host = psutil.virtual_memory()
    free, total = (host.available, host.total) if is_cpu else torch.accelerator.get_memory_info(device)
    return Compute(
        str(device),
        _name_of(device),
        free,
        total,
        2 * size**3 / min(times) / 1e12,
        # In sums of rows, the rounding of thousands of elements would hide that one of them is wrong.
        torch.equal(exact.double().sum(1).cpu(), expected)
        and torch.allclose(product.float(), exact, rtol=_ROUNDING, atol=0),
    )
