"""Runs a function on several ranks, each a process of its own, and gives back what they return."""

import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from converters.layouts.megatron import ParallelSizes
from megarl.process.ports import free_port
from megatron_ext import device

device.install()
from megatron.core import parallel_state  # noqa: E402 (after the device layer)

from megatron_ext import parallel  # noqa: E402

Case: TypeAlias = tuple[Any, ...]

_POLL_S = 0.02


def run_ranks(
    function: Callable[..., Any], sizes: ParallelSizes, *arguments: Any, timeout_s: float = 500.0
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


def run_in_turn(cases: Sequence[Case], timeout_s: float = 500.0) -> list[list[Any]]:
    """Call the functions of all `cases`, for one number of ranks, one after the other in one launch.

    A case is `(function, sizes, *arguments)`, as for `run_ranks`; groups are made again for each. Returns, for each
    case, the results by rank.
    """
    by_rank = run_ranks(_in_turn, cases[0][1], cases, timeout_s=timeout_s)
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def _in_turn(rank: int, _sizes: ParallelSizes, cases: Sequence[Case]) -> list[Any]:
    results = []
    for function, sizes, *arguments in cases:
        parallel_state.destroy_model_parallel()
        parallel.initialize(sizes, rank, init_method="")
        results.append(function(rank, sizes, *arguments))
        torch.distributed.barrier()
        _destroy_groups()
    return results


def _destroy_groups() -> None:
    """End all process groups but that of all ranks: Megatron forgets them, and each keeps threads."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    # torch remembers for operations of DTensors their results' group, too, and would give it to those of a new one.
    _clear_sharding_prop_cache()


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
    # A search for garbage would copy all that earlier tests have left.
    gc.freeze()
    try:
        parallel.initialize(sizes, rank, init_method)
        result = function(rank, sizes, *arguments)
        torch.save(result, folder / f"{rank}.pt")
        torch.distributed.barrier()
        parallel.shutdown()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise
