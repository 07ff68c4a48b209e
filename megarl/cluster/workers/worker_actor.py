"""A worker process: a Ray actor that creates one object and forwards calls to it."""

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
"""IP address and port."""
_CONNECT_S = 10.0
"""How long another machine may take to accept a connection."""


class WorkerActor:
    """Holds one object. Heavy modules are imported here, not in the controller."""

    def __init__(self, log: Path, shared_gpus: Sequence[str] | None = None) -> None:
        """Without `shared_gpus` the process uses the GPUs that Ray assigns to it."""
        # If someone else started Ray, limits may be low: each connection of a rank is an open file, and network cards
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
        """Import `name`, a class or factory, from `module`, and create the object."""
        if self._listener is not None:
            self._listener.close()
        self._object = load(module, name)(*arguments)

    def node(self) -> str:
        """The Ray node ID of this process's machine."""
        return ray.get_runtime_context().get_node_id()

    def gpus(self) -> list[str]:
        """The GPUs assigned to this process, by Ray's numbers on this machine."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def log_to(self, log: Path) -> None:
        """Send everything that this process prints, C++ libraries included, to `log`."""
        _redirect_output(log)

    def end_others(self, log: Path) -> None:
        """Kill what is left on this machine of processes that wrote to `log` before."""
        end_other_writers(log)

    def listen(self) -> SocketAddress:
        """Listen until `make`; return the address."""
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
        """This machine's address, with a port that was free a moment ago."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start_profiler(self) -> None:
        """Start recording this process."""
        self._profiler = load("megarl.process.profiler", "Profiler")()
        self._profiler.start()

    def stop_profiler(self, most_events: int, since_us: float) -> bytes:
        """The events since `start_profiler`, see `Profiler.stop`; none in a process that started later."""
        profiler, self._profiler = self._profiler, None
        return b"" if profiler is None else profiler.stop(most_events, since_us)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments)

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Call a generator method of the object; yield each result with the number of its long arrays.

        The long arrays follow as items of their own, then None, so the caller need not fetch them, and owns them. Had
        they been put into the store here, they would end with this process. Ray (2.60) could even lose them earlier: it
        may ask the caller whether it still needs an item's references before the caller has received the item.
        """
        for result in getattr(self._object, method)(*arguments):
            rest, arrays = taken_out(result)
            yield rest, len(arrays)
            if arrays:
                for array in (*arrays, None):  # noqa: UP028 - Ray sends to what this gives
                    yield array


def _complete_environment() -> None:
    """Set the node's network variables unless they are already set; variables set to the empty string are unset."""
    for name, value in network_environment(ray.util.get_node_ip_address()).items():
        if os.environ.setdefault(name, value) == "":
            del os.environ[name]


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    # Readable only by the user: at log level info, SGLang's server prints its key.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with suppress(PermissionError):  # The file may already exist and belong to another user.
        os.fchmod(descriptor, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Resumed runs and restarted engines, on any machine, append to the same file.
    print(f"{time.strftime('%F %T')} {log.stem} is process {os.getpid()} on {socket.gethostname()}", flush=True)
