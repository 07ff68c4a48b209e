"""Speed of the kernels that pack, unpack and quantise in a refit, compared with a copy of the same bytes.

The weights are experts of DeepSeek-V3 that fill a bucket. In each round every kernel runs once, and its best round
counts: gigabytes of bfloat16 per second, and this rate divided by that of torch's copy of the same weights. On a CPU
the seconds are the CPU time of one thread, on which other processes have little effect. The second table is for several
processes that run the same kernels at once, as the ranks of a machine do: gigabytes of all of them per second of wall
time, as the median of the rounds.
"""

import argparse
import importlib
import multiprocessing
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from isal import isal_zlib
from machine import at_least_one, describe
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from converters.fp8 import BLOCK, scales_shape  # noqa: E402 (found by the line above)
from megarl.resharding.kernels import Block, Quantised, gather, scatter  # noqa: E402
from megarl.rollout.sglang.installation import PACKAGES  # noqa: E402
from megatron_ext import device  # noqa: E402

SHAPES = {"gate and up": (4096, 7168), "down": (7168, 2048)}
"""Shapes of an expert's weights in DeepSeek-V3."""
Work = Callable[[], object]
Quantise = Callable[[Tensor], object]


@dataclass(frozen=True)
class Buckets:
    """The weights of a bucket, and the blocks that the kernels move: in bfloat16, and to FP8."""

    weights: list[Tensor]
    plain: list[Block]
    quantised: list[Block]


def buckets(experts: int, where: torch.device) -> Buckets:
    """The weights of `experts` experts, and one block each for packing and for quantising all of them."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator).mul_(0.02).bfloat16().to(where)
        for _ in range(experts)
        for shape in SHAPES.values()
    ]
    return Buckets(weights, [plain(weights)], [quantised(weights)])


def plain(boxes: list[Tensor]) -> Block:
    memory = torch.empty(sum(box.nbytes for box in boxes), dtype=torch.uint8, device=boxes[0].device)
    pieces = memory.split([box.nbytes for box in boxes])
    packed = [piece.view(box.dtype).view(box.shape) for piece, box in zip(pieces, boxes, strict=True)]
    return Block(memory, packed, boxes, ["weight"] * len(boxes))


def quantised(boxes: list[Tensor]) -> Block:
    shapes = [(box.shape[0], box.shape[1]) for box in boxes]
    sizes = [
        size for shape in shapes for size in (shape[0] * shape[1], 4 * scales_shape(shape)[0] * scales_shape(shape)[1])
    ]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=boxes[0].device)
    pieces = iter(memory.split(sizes))
    found = [
        Quantised(
            "weight",
            box,
            next(pieces).view(torch.float8_e4m3fn).view(shape),
            next(pieces).view(torch.float32).view(scales_shape(shape)),
        )
        for box, shape in zip(boxes, shapes, strict=True)
    ]
    return Block(memory, [], [], [], found)


def by_hand(weights: list[Tensor], memory: Tensor) -> None:
    """Copy all weights, then compute the checksum of the copy: packing without a fused kernel."""
    torch.cat([weight.view(-1).view(torch.uint8) for weight in weights], out=memory)
    if memory.device.type == "cpu":
        isal_zlib.crc32(memory.numpy())
    else:
        words = memory.view(torch.int32)
        (words * torch.arange(1, len(words) + 1, device=memory.device)).sum().item()


def quantise_by_hand(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix whose sizes are multiples of the block size, in plain torch."""
    rows, columns = scales_shape((weight.shape[0], weight.shape[1]))
    blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scales).to(torch.float8_e4m3fn), scales


def kernels(found: Buckets) -> dict[str, Work]:
    """A refit's kernels on all weights of the bucket; the first entry is a plain copy of as many bytes."""
    memory = torch.empty(
        sum(weight.nbytes for weight in found.weights), dtype=torch.uint8, device=found.weights[0].device
    )
    # Filled, as the pages of fresh zeros may all be one, which stays in the cache.
    source = torch.zeros_like(memory).fill_(1)
    return {
        "a copy": lambda: memory.copy_(source),
        "pack": lambda: [gather(block, None) for block in found.plain],
        "pack, with checksum": lambda: [gather(block, 0) for block in found.plain],
        "unpack, with checksum": lambda: [scatter(block, 0) for block in found.plain],
        "quantise, with checksum": lambda: [gather(block, 0) for block in found.quantised],
    }


def contenders(found: Buckets) -> Mapping[str, Work]:
    """The timed kernels: those of a refit, and other implementations of the same."""
    memory = torch.empty(
        sum(weight.nbytes for weight in found.weights), dtype=torch.uint8, device=found.weights[0].device
    )
    works = kernels(found) | {
        "pack with checksum in plain torch": lambda: by_hand(found.weights, memory),
        "quantise in plain torch": lambda: [quantise_by_hand(weight) for weight in found.weights],
    }
    for name, quantise in quantisers():
        works[f"quantise by {name}"] = partial(quantise_all, quantise, found.weights)
    return works


def quantisers() -> Iterator[tuple[str, Quantise]]:
    """Block quantisation of other projects, if installed."""
    if find_spec("vllm") is not None:
        yield "vLLM", importlib.import_module("vllm.utils.deep_gemm").per_block_cast_to_fp8
    if device.has_transformer_engine():
        yield "Transformer Engine", transformer_engine()
    # Last, since it brings other versions of some packages.
    add_sglang()
    if find_spec("sglang") is not None:
        functions = importlib.import_module("sglang.srt.layers.quantization.fp8_utils")
        yield "SGLang, to powers of two", functions.per_block_cast_to_fp8


def transformer_engine() -> Quantise:
    """Transformer Engine's block quantiser, for codes and scales by rows only, as engines hold them."""
    module = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    codes = importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3
    return module.Float8BlockQuantizer(codes, rowwise=True, columnwise=False, force_pow_2_scales=False)


def add_sglang() -> None:
    """Make SGLang importable from where `make setup SGLANG=1` installs it, outside megarl's environment."""
    packages = Path(sys.prefix).parent / PACKAGES
    if (packages / "sglang").is_dir():
        sys.path.insert(0, str(packages))
        if device.device().type == "cpu":
            from megarl.rollout.sglang import cpu

            cpu.corrections.install()


def quantise_all(quantise: Quantise, weights: list[Tensor]) -> None:
    for weight in weights:
        quantise(weight)


def best_s(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Minimum seconds of each kernel; all run in turn in every round, and the first round is not counted."""
    clock = time.thread_time if device.device().type == "cpu" else time.perf_counter
    best = dict.fromkeys(works, float("inf"))
    for number in range(rounds + 1):
        for name, work in works.items():
            device.synchronize()
            start = clock()
            work()
            device.synchronize()
            if number:
                best[name] = min(best[name], clock() - start)
    return best


def time_beside_others(experts: int, rounds: int, begin: Barrier, result: Connection) -> None:
    """Send the seconds of each kernel in each round but the first; all processes start each at the same time."""
    torch.set_num_threads(1)
    works = kernels(buckets(experts, device.device()))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin.wait()
            start = time.perf_counter()
            work()
            if number:
                seconds[name].append(time.perf_counter() - start)
    result.send(seconds)


def median_s(processes: int, experts: int, rounds: int) -> dict[str, float]:
    """Seconds until the last of `processes` processes finishes each kernel; the median over the rounds."""
    spawn = multiprocessing.get_context("spawn")
    begin = spawn.Barrier(processes)
    pipes = [spawn.Pipe(duplex=False) for _ in range(processes)]
    for _, sender in pipes:
        spawn.Process(target=time_beside_others, args=(experts, rounds, begin, sender), daemon=True).start()
    seconds = [receiver.recv() for receiver, _ in pipes]
    return {
        name: statistics.median(map(max, zip(*(each[name] for each in seconds), strict=True))) for name in seconds[0]
    }


def table(seconds: Mapping[str, float], nbytes: int) -> list[str]:
    """Lines of Markdown: the bytes per second of each kernel, from its seconds for `nbytes`."""
    rates = {name: nbytes / each / 1e9 for name, each in seconds.items()}
    lines = [f"| {name} | {rate:.2f} | {rate / rates['a copy']:.2f} |" for name, rate in rates.items()]
    return ["| work | GB/s | of a copy |", "|---|---:|---:|", *lines, ""]


def tables(experts: int, rounds: int, processes: int) -> Iterator[str]:
    """Lines of Markdown: alone, and on a CPU in several processes at once."""
    found = buckets(experts, device.device())
    nbytes = sum(weight.nbytes for weight in found.weights)
    yield from (f"{nbytes / 1e6:.0f} MB of bfloat16 in {len(found.weights)} weights.", "")
    yield from table(best_s(contenders(found), rounds), nbytes)
    if device.device().type == "cpu" and processes > 1:
        yield from (f"In {processes} processes at once:", "")
        yield from table(median_s(processes, experts, rounds), nbytes * processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=20)
    parser.add_argument("--experts", type=at_least_one, default=1, help="how many experts are in the bucket")
    parser.add_argument("--processes", type=at_least_one, default=2, help="on a CPU, as many do the same at once")
    parser.add_argument("--write", type=Path, help="file for the results, in Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    lines = [
        f"# Kernels of a refit on {place}",
        "",
        f"Date: {date.today()}",
        "",
        f"Machine: {describe(ROOT)}",
        "",
        f"Versions: torch {torch.__version__}",
        "",
        f"Command: `python {' '.join(sys.argv)}`",
        "",
        *(textwrap.dedent(__doc__ or "").split("\n\n", 1)[1].split("\n")),
        *tables(options.experts, options.rounds, options.processes),
    ]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
