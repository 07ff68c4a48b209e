"""How long a run waits for a checkpoint that is written while it waits, or in the background, in alternating saves.

A model with the sizes of SmolLM2-135M in bf16, with its optimizer, on one or more data-parallel ranks. A run waits for
two calls of a background save: its beginning, and its end once everything is written. In between, the state is copied
during the rollout that follows; a train step, or another turn on shared GPUs, that comes sooner waits for the copy.
"""

import argparse
import multiprocessing
import resource
import shutil
import tempfile
import time
from datetime import date
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from machine import at_least_one, describe, give_out

from megatron_ext import device

device.install()

import torch  # noqa: E402

from converters.architectures import read_architecture  # noqa: E402
from converters.layouts.megatron import ParallelSizes  # noqa: E402
from megarl.process.ports import free_port  # noqa: E402
from megatron_ext import compat, parallel  # noqa: E402
from megatron_ext.checkpoint import checkpoint  # noqa: E402
from megatron_ext.megatron_model import MegatronModel  # noqa: E402
from megatron_ext.options.options import MegatronOptions  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
"""Sizes of SmolLM2-135M. The values of the weights do not matter here."""


class Saves(NamedTuple):
    """Seconds of each save of one rank, bytes of a checkpoint, and memory."""

    waiting: list[float]
    """Duration of a save that the run waits for."""
    blocked: list[float]
    """Time for which a background save blocks the run."""
    copied: list[float]
    """From the start of a background save until the state may change."""
    written: list[float]
    """From the start of a background save until it is written."""
    nbytes: int
    more_memory: int
    """Additional peak resident memory compared with saves that the run waits for."""


def measure(rank: int, sizes: ParallelSizes, init_method: str, repeats: int, folder: Path) -> Saves:
    """Save `repeats` times each way, alternating, after a warm-up save of each kind."""
    torch.set_num_threads(1)
    parallel.initialize(sizes, rank, init_method)
    model = MegatronModel(
        read_architecture(CONFIG), MegatronOptions(sizes, torch.bfloat16, optimizer={"lr": 1e-5}, scheduler={}), rank
    )
    for tensor in model.local_tensors().values():
        tensor.data.normal_(std=0.02)
    model.prepare_training(1)
    compat.prime_optimizer_state(model.optimizer)
    saving, saves = checkpoint.Saving(model), Saves([], [], [], [], 0, 0)
    _timed_save(saving, model, folder, in_background=False)
    before = _peak_resident()
    for number in range(repeats + 1):
        waiting = _timed_save(saving, model, folder, in_background=False).written
        found = _timed_save(saving, model, folder, in_background=True)
        if number:
            saves.waiting.append(waiting)
            saves.blocked.append(found.blocked)
            saves.copied.append(found.copied)
            saves.written.append(found.written)
    nbytes = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    parallel.shutdown()
    return saves._replace(nbytes=nbytes, more_memory=_peak_resident() - before)


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Save(NamedTuple):
    """Seconds of one save; see `Saves`."""

    blocked: float
    copied: float
    written: float


def _timed_save(saving: checkpoint.Saving, model: MegatronModel, folder: Path, *, in_background: bool) -> _Save:
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    torch.distributed.barrier()
    started = time.perf_counter()
    saving.begin(folder, in_background=in_background)
    begun = time.perf_counter()
    model.take_state_back()
    copied = time.perf_counter()
    while in_background and not _all_written(saving):
        time.sleep(0.01)
    finished = time.perf_counter()
    saving.finish()
    end = time.perf_counter()
    return _Save(begun - started + end - finished, copied - started, end - started)


def _all_written(saving: checkpoint.Saving) -> bool:
    written = torch.tensor(float(saving.is_written()))
    torch.distributed.all_reduce(written, op=torch.distributed.ReduceOp.MIN)
    return bool(written)


def _run(
    rank: int, sizes: ParallelSizes, init_method: str, repeats: int, folder: Path, results: "SimpleQueue[Any]"
) -> None:
    results.put((rank, measure(rank, sizes, init_method, repeats, folder)))


def on_ranks(ranks: int, repeats: int, folder: Path) -> Saves:
    """The saves of the slowest of `ranks` data-parallel ranks."""
    context = multiprocessing.get_context("spawn")
    init_method, results = f"tcp://127.0.0.1:{free_port('127.0.0.1', 0)}", context.SimpleQueue()
    arguments = (ParallelSizes(world_size=ranks), init_method, repeats, folder, results)
    processes = [context.Process(target=_run, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    of_ranks = [results.get()[1] for _ in processes]
    for process in processes:
        process.join()
    return max(of_ranks, key=lambda saves: median(saves.blocked))


def report(options: argparse.Namespace) -> str:
    """Return the page, with a row for each number of ranks."""
    lines = [
        "# A checkpoint",
        "",
        __doc__.partition("\n\n")[2].replace("\n", " ").strip(),
        "",
        f"`make benchmark-checkpoint`, {date.today()}, {describe(options.folder)}. Medians of {options.repeats}"
        " alternating saves, of the slowest rank; seconds.",
        "",
        "| ranks | GB | the run waits | in the background: the run waits | copied after | written after | share"
        " | more resident, GB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            saves = on_ranks(ranks, options.repeats, Path(folder) / "checkpoint")
        waiting, blocked, copied, written = (
            median(each) for each in (saves.waiting, saves.blocked, saves.copied, saves.written)
        )
        lines.append(
            f"| {ranks} | {saves.nbytes / 1e9:.2f} | {waiting:.2f} | {blocked:.3f} | {copied:.2f} | {written:.2f} |"
            f" {blocked / waiting:.3f} | {saves.more_memory / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print the page or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=at_least_one, default=[1, 2])
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to write to")
    parser.add_argument("--write", type=Path, help="a Markdown file, in place of standard output")
    options = parser.parse_args()
    text = report(options)
    give_out(text, options.write)


if __name__ == "__main__":
    main()
