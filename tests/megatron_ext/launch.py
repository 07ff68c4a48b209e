"""Runs a function on several ranks, each a process of its own, and gives back what they return."""

import multiprocessing
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from converters.layouts.megatron import ParallelSizes
from megatron_ext import device

device.install()
from megatron_ext import parallel  # noqa: E402 (after the device layer)

_POLL_S = 0.02


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(
    function: Callable[..., Any], sizes: ParallelSizes, *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `function(rank, sizes, *arguments)` on every rank of a job of `sizes`; returns the results by rank.

    `function` is at the top of a module; Megatron's groups exist when it is called. Raises RuntimeError with the
    traceback of the first rank that failed, or if the ranks are not done after `timeout_s`; no process is left.
    """
    # Forked, so that the ranks need not import torch and megatron each; CUDA does not survive a fork.
    context = multiprocessing.get_context("fork" if device.backend() == "gloo" else "spawn")
    init_method = f"tcp://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, sizes, arguments, rank, init_method, Path(folder)))
            for rank in range(sizes.world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(folder), time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(sizes.world_size)]


def _wait(processes: list[Any], folder: Path, deadline: float) -> None:
    while any(process.is_alive() for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for rank, process in enumerate(processes):
        if process.exitcode:
            report = folder / f"{rank}.txt"
            raise RuntimeError(f"rank {rank}: {report.read_text() if report.exists() else process.exitcode}")
    if any(process.is_alive() for process in processes):
        raise RuntimeError("the ranks did not end in time")


def _rank(
    function: Callable[..., Any], sizes: ParallelSizes, arguments: tuple, rank: int, init_method: str, folder: Path
) -> None:
    torch.set_num_threads(1)
    try:
        parallel.initialize(sizes, rank, init_method)
        result = function(rank, sizes, *arguments)
        torch.save(result, folder / f"{rank}.pt")
        torch.distributed.barrier()
        parallel.shutdown()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise
