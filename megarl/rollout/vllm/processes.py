"""Makes processes that vLLM 0.32.0 starts for data parallelism end with the engine, and listen only where asked."""

import functools
import os
import signal
import socket
from typing import Any

from megarl.process.loading import load
from megarl.sandbox.process_tree import die_with


def end_with_this_process() -> None:
    """Make ranks and their coordinator end when this process does, however it ends.

    They wait at sockets that do not notice a killed process, and would stay.
    """
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    from vllm.v1.engine.core import EngineCoreProc

    for owner, name in ((EngineCoreProc, "run_engine_core"), (DPCoordinatorProc, "run_coordinator")):
        setattr(owner, name, functools.partial(_run, os.getpid(), owner.__module__, owner.__name__, name))


def listen_where_asked() -> None:
    """Make the stores of a rendezvous listen only at the host that they are given; idempotent.

    torch (2.11 to 2.13) binds a store to all interfaces unless it is given a socket, which vLLM does only for some.
    """
    from vllm.distributed import parallel_state, utils

    original = utils.create_tcp_store
    if original.__module__ == __name__:
        return

    def create(host: str, port: int, listen_socket: socket.socket | None = None, **options: Any) -> Any:
        if listen_socket is None and options.get("is_master"):
            listen_socket = socket.create_server((host, port))
            port = listen_socket.getsockname()[1]
        return original(host, port, listen_socket, **options)

    utils.create_tcp_store = parallel_state.create_tcp_store = create


def _run(parent: int, module: str, owner: str, name: str, *arguments: Any, **options: Any) -> None:
    die_with(parent, signal.SIGKILL)
    getattr(load(module, owner), name)(*arguments, **options)
