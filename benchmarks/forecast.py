"""Accuracy of `megarl plan` for refits that can be run: those of `refit.py`, on the cores of this machine.

In each round the rates that a forecast needs are measured separately (`resharding/rates.py`), then every refit runs
once, and is forecast from that round's rates. Nothing is fitted: the model of `megarl/planning` has no other
parameters.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

from machine import at_least_one, describe
from resharding.contenders.nixl_read import SOCKETS
from resharding.contenders.table import (
    DIRECT,
    DIRECT_GLOO,
    DIRECT_RDMA,
    DIRECT_RDMA_SOCKETS,
    FP8,
    FP8_GLOO,
    FP8_RDMA,
    FP8_RDMA_SOCKETS,
)
from resharding.forecasting import Way, forecast
from resharding.models import ENGINE, ENGINES, MODELS, TRAINER, TRAINERS
from resharding.processes import running
from resharding.rank import Rank
from resharding.rates import Worker, core_rates, way_costs
from resharding.scenario import Scenario

WAYS: Mapping[str, Way] = {
    DIRECT: Way("shared_memory", ""),
    DIRECT_GLOO: Way("tcp", ""),
    DIRECT_RDMA: Way("rdma", ""),
    DIRECT_RDMA_SOCKETS: Way("rdma", SOCKETS),
    FP8: Way("shared_memory", "", is_fp8=True),
    FP8_GLOO: Way("tcp", "", is_fp8=True),
    FP8_RDMA: Way("rdma", "", is_fp8=True),
    FP8_RDMA_SOCKETS: Way("rdma", SOCKETS, is_fp8=True),
}
"""The refits, named as in `refit.py`."""
WITHIN = 0.15
"""Target: maximum relative error of a prediction."""
_NOTES = """\
- **Predicted** is what `megarl.planning` makes of the plan, the size of the buckets and these rates alone: the replay
  of every message, in which the works of all ranks wait for one of the cores. **Measured** is the refit as `refit.py`
  runs it, with checksums; both are medians over the rounds, and so is the ratio of the two within a round.
- The rates are measured in each round, beside the refits, in seconds of cores, all of which work: packing and unpacking
  with a CRC-32, in messages of the same size, of a tensor of 134 MB, whole and half of its rows; quantising it; the
  CRC-32 alone, for what `rdma` reads past the buckets; a bare move between buckets, where a transport moves anything;
  and a message of 256 bytes, between copies of a bucket that push all else out of the caches.
- "Of CPU s" is the same ratio of the seconds of cores, those of all ranks together. The model
  leaves out time in which a core waits although there is work, and what else the machine does.
"""


@dataclass
class Found:
    """Seconds of one refit, per round."""

    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    """Predicted over measured CPU time of all cores together."""

    @property
    def ratios(self) -> list[float]:
        """Predicted over measured time."""
        return [one / other for one, other in zip(self.predicted, self.measured, strict=True)]


def main() -> None:
    """Measure, forecast and print; see `--help`."""
    options = _parse_options()
    cores = len(os.sched_getaffinity(0))
    lines = _head()
    for model in options.models:
        for trainer, engine in options.ranks:
            scenario = Scenario(MODELS[model], None, round(options.bucket_mb * 1e6), trainer, engine)
            refits = [name for name in options.only if scenario.fp8 is not None or not WAYS[name].is_fp8]
            found, rates = _measure(scenario, refits, options.rounds, cores)
            lines += [f"## {model}, {scenario.model_bytes() / 1e6:.0f} MB, from {trainer} to {engine}", ""]
            lines += [*rates, "", *_table(found), ""]
    lines += ["## What is compared", "", _NOTES]
    print("\n".join(lines))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines))


def _measure(
    scenario: Scenario, refits: Sequence[str], rounds: int, cores: int
) -> tuple[Mapping[str, Found], Sequence[str]]:
    found = {name: Found() for name in refits}
    transports = list(dict.fromkeys((WAYS[name].transport, WAYS[name].ucx_tls) for name in refits))
    said: dict[str, list[float]] = {}
    with ExitStack() as running_:
        workers = running_.enter_context(running(2 * cores, Worker, scenario.bucket_bytes))
        ranks = running_.enter_context(running(scenario.ranks, Rank, scenario))
        for transport in transports:
            workers.call("open", *transport)
        for name in refits:
            ranks.call("open", name)
        for number in range(rounds + 1):
            of_cores = core_rates(workers)
            costs = {each: way_costs(workers, *each) for each in transports}
            for name in refits:
                way = WAYS[name]
                run = ranks.time("run", name)
                if number:  # The first round only creates views and touches memory.
                    made = forecast(scenario, way, of_cores, costs[way.transport, way.ucx_tls], cores)
                    found[name].measured.append(run.seconds)
                    found[name].predicted.append(made.replay.seconds)
                    found[name].work.append(made.stages["cores"] * cores / run.cpu_seconds)
            if number:
                for what, rate in vars(of_cores).items():
                    said.setdefault(f"{what}, GB/s", []).append(rate / 1e9)
                for (by, ucx_tls), cost in costs.items():
                    name = by + (", sockets" if ucx_tls else "")
                    said.setdefault(f"a byte sent by {name}, ns", []).append(cost.of_byte_sent * 1e9)
                    said.setdefault(f"a byte received by {name}, ns", []).append(cost.of_byte_received * 1e9)
                    said.setdefault(f"a message by {name}, us", []).append(cost.of_message * 1e6)
    rates = ["Rates of a core: " + "; ".join(f"{what} {median(values):.2f}" for what, values in said.items()) + "."]
    return found, rates


def _table(found: Mapping[str, Found]) -> Iterator[str]:
    yield "| refit | predicted, s | measured, s | least to most | predicted / measured | least to most | of CPU s |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, each in found.items():
        ratio, ratios, measured = median(each.ratios), each.ratios, each.measured
        yield (
            f"| {name} | {median(each.predicted):.3f} | {median(measured):.3f} | {min(measured):.3f} to"
            f" {max(measured):.3f} | {ratio:.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
            f" {median(each.work):.2f} |"
        )
    off = [abs(median(each.ratios) - 1) for each in found.values()]
    near = sum(each <= WITHIN for each in off)
    yield ""
    yield f"Within {WITHIN:.0%}: {near} of {len(off)}; the farthest is {max(off):.0%} off."


def _head() -> list[str]:
    return [
        "# Refits on a CPU, predicted and measured",
        "",
        f"Date: {date.today()}",
        "",
        f"Machine: {describe(Path('/dev/shm'))}",
        "",
        f"Command: `python {shlex.join(sys.argv)}`",
        "",
    ]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["qwen3_moe"], help="which to move")
    parser.add_argument("--rounds", type=at_least_one, default=10, help="runs of each refit")
    parser.add_argument("--bucket-mb", type=float, default=16, metavar="MB", help="10^6 bytes, of each bucket")
    parser.add_argument("--only", choices=WAYS, nargs="+", default=list(WAYS), help="which refits")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        nargs="+",
        default=[(TRAINER, ENGINE)],
        metavar="TRAINER:ENGINE",
        help=f"cuts of trainer ({', '.join(TRAINERS)}) and engine ({', '.join(ENGINES)})",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    return parser.parse_args()


def _ranks(text: str) -> tuple[str, str]:
    trainer, _, engine = text.partition(":")
    if trainer not in TRAINERS or engine not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text} is not of {', '.join(TRAINERS)} and {', '.join(ENGINES)}")
    return trainer, engine


if __name__ == "__main__":
    main()
