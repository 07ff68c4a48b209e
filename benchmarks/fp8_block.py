"""How fast block FP8 is made and read on a CPU, beside a copy of the bfloat16 side and what torch does by itself.

Run with `OMP_NUM_THREADS=1` for one thread. Every figure is the best of a number of runs, in gigabytes of bfloat16 a
second.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from converters.fp8 import BLOCK, dequantise_into, quantise, quantise_into

SHAPES = {
    "an expert of DeepSeek-V3": (2048, 7168),
    "its down projection": (7168, 2048),
    "its key and value projection": (32768, 512),
    "an expert of Qwen3-30B": (768, 2048),
}


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def gigabytes_per_second(work: Callable[[], object], nbytes: int, runs: int) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


def measure(shape: tuple[int, int], runs: int) -> list[float]:
    weight = torch.randn(shape).bfloat16()
    codes, scales = quantise(weight)
    out = torch.empty_like(weight)
    works: list[Callable[[], object]] = [
        lambda: out.copy_(weight),
        lambda: quantise_into(weight, codes, scales),
        lambda: dequantise_into(codes, scales, out),
        lambda: (codes.float() * spread(scales, weight.shape)).bfloat16(),
    ]
    return [gigabytes_per_second(work, weight.nbytes, runs) for work in works]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    runs = parser.parse_args().runs
    table = Table(title=f"Block FP8, {torch.get_num_threads()} thread(s), GB/s of bfloat16")
    for column in ("weight", "shape", "copy", "quantise", "dequantise", "dequantise in plain torch"):
        table.add_column(column, justify="left" if column == "weight" else "right")
    for name, shape in SHAPES.items():
        table.add_row(name, "x".join(map(str, shape)), *(f"{rate:.2f}" for rate in measure(shape, runs)))
    Console().print(table)


if __name__ == "__main__":
    main()
