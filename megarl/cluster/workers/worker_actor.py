"""A worker process: a Ray actor that imports and makes one object and passes calls on to it."""

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import ray

from megarl.cluster.ray.network_environment import network_environment
from megarl.cluster.workers.long_arrays import taken_out
from megarl.process.loading import load
from megarl.process.own_programs import find_own_programs
from megarl.process.ports import free_port
from megarl.process.raised_limits import raise_limits
from megarl.process.writers import end_other_writers

SocketAddress: TypeAlias = tuple[str, int]
"""An address and a port of a machine."""
_CONNECT_S = 10.0
"""How long another machine has to answer."""


class WorkerActor:
    """Holds one object. Heavy modules are imported here and not in the controller."""

    def __init__(self, log: Path, shared_gpus: Sequence[str] | None = None) -> None:
        """Without `shared_gpus` the process has the GPUs that Ray gives it."""
        # Where others started Ray, the limits may be low: each connection of a rank is an open file, and network cards
        # lock the memory that they read.
        raise_limits()
        find_own_programs()
        self._object: Any = None
        self._profiler: Any = None
        self._listener: socket.socket | None = None
        if shared_gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared_gpus)
        self.log_to(log)
        _complete_environment()

    def make(self, module: str, name: str, *arguments: Any) -> None:
        """Import `name`, a class or another maker, from `module` and make the object."""
        if self._listener is not None:
            self._listener.close()
        self._object = load(module, name)(*arguments)

    def node(self) -> str:
        """The machine this process runs on, as Ray names it."""
        return ray.get_runtime_context().get_node_id()

    def gpus(self) -> list[str]:
        """The GPUs assigned to this process, by Ray's numbers on this machine."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def log_to(self, log: Path) -> None:
        """Send everything that this process prints, C++ libraries included, to `log`."""
        _redirect_output(log)

    def end_others(self, log: Path) -> None:
        """End what is left, on this machine, of those that wrote to `log` before."""
        end_other_writers(log)

    def listen(self) -> SocketAddress:
        """Listen until `make`, at this address."""
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self._listener.getsockname()

    def unreached(self, addresses: Sequence[SocketAddress]) -> dict[int, str]:
        """Which of the addresses this process cannot connect to, and why."""
        reasons = {}
        for number, address in enumerate(addresses):
            try:
                socket.create_connection(address, timeout=_CONNECT_S).close()
            except OSError as error:
                reasons[number] = str(error)
        return reasons

    def free_address(self) -> SocketAddress:
        """The address of this machine, and a port of it that was free a moment ago."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start_profiler(self) -> None:
        """Begin to record what this process does."""
        self._profiler = load("megarl.process.profiler", "Profiler")()
        self._profiler.start()

    def stop_profiler(self, most_events: int, since_us: float) -> bytes:
        """The events since `start_profiler`, see `Profiler.stop`; none in a process that has begun since then."""
        profiler, self._profiler = self._profiler, None
        return b"" if profiler is None else profiler.stop(most_events, since_us)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments)

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Call a generator method of the object; yields each result with the number of its long arrays.

        These are taken out and follow by themselves, and then None: the caller need not fetch them. They are the
        caller's. Had they been put into the store here, they would end with this process, and Ray (2.60) could lose
        them before: the caller may be asked whether it still needs what an item names before it has heard of the item.
        """
        for result in getattr(self._object, method)(*arguments):
            rest, arrays = taken_out(result)
            yield rest, len(arrays)
            if arrays:
                for array in (*arrays, None):  # noqa: UP028 - Ray sends to what this gives
                    yield array


def _complete_environment() -> None:
    """Set what the network of this node asks for and nobody has set; what is set to nothing is unset."""
    for name, value in network_environment(ray.util.get_node_ip_address()).items():
        if os.environ.setdefault(name, value) == "":
            del os.environ[name]


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    # Whatever libraries print is nobody else's: at its level of info SGLang's server says its key.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with suppress(PermissionError):  # It may be there already, and be somebody else's.
        os.fchmod(descriptor, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Runs that go on, and engines that are restarted on whatever machine, append to the same file.
    print(f"{time.strftime('%F %T')} {log.stem} is process {os.getpid()} on {socket.gethostname()}", flush=True)
