"""The table of `refit.py`: medians over the rounds, and ratios of contenders in the same round."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from resharding.contenders.table import (
    CHANGES,
    CHANGES_GLOO,
    CHANGES_RDMA_SOCKETS,
    DIRECT,
    DIRECT_GLOO,
    DIRECT_GLOO_TO_MEGATRON,
    DIRECT_RDMA,
    DIRECT_RDMA_SOCKETS,
    DIRECT_RDMA_WITHOUT_CHECKSUMS,
    DIRECT_TO_MEGATRON,
    DIRECT_WITHOUT_CHECKSUMS,
    FP8,
    FP8_GLOO,
    FP8_RDMA,
    FP8_RDMA_SOCKETS,
    GATHERED_BROADCAST,
    GATHERED_SHARED,
    MEGATRON_CORE,
    MEMCPY,
    NIXL_READ,
    NIXL_READ_CHECKSUMS,
    NIXL_READ_CHECKSUMS_SOCKETS,
    NIXL_READ_SOCKETS,
)
from resharding.rounds import Facts, Run

_MB = 1e6
_COLUMNS = (
    "median over rounds",
    "seconds",
    "least to most",
    "GB/s",
    f"/ {MEMCPY}",
    "CPU s",
    "bytes moved / needed",
    "extra MB of a trainer rank",
    "of a worker",
)
_BARE = (MEMCPY, NIXL_READ, NIXL_READ_SOCKETS, NIXL_READ_CHECKSUMS, NIXL_READ_CHECKSUMS_SOCKETS)
_COMPARED = (
    (DIRECT, MEMCPY, "at most 1.5"),
    (DIRECT_WITHOUT_CHECKSUMS, MEMCPY, None),
    (NIXL_READ, MEMCPY, None),
    (DIRECT_RDMA, NIXL_READ, "at most 1.15"),
    (DIRECT_RDMA_WITHOUT_CHECKSUMS, NIXL_READ, None),
    (DIRECT_RDMA_SOCKETS, NIXL_READ_SOCKETS, "at most 1.15"),
    (NIXL_READ_CHECKSUMS, NIXL_READ, None),
    (NIXL_READ_CHECKSUMS_SOCKETS, NIXL_READ_SOCKETS, None),
    (DIRECT_RDMA, NIXL_READ_CHECKSUMS, None),
    (DIRECT_RDMA_SOCKETS, NIXL_READ_CHECKSUMS_SOCKETS, None),
    (DIRECT_GLOO, DIRECT_RDMA, None),
    (DIRECT_GLOO, DIRECT_RDMA_SOCKETS, None),
    (FP8, DIRECT, "at most 0.6"),
    (FP8_GLOO, DIRECT_GLOO, "at most 0.6"),
    (FP8_RDMA, DIRECT_RDMA, "at most 0.6"),
    (FP8_RDMA_SOCKETS, DIRECT_RDMA_SOCKETS, "at most 0.6"),
    (CHANGES, DIRECT, None),
    (CHANGES_GLOO, DIRECT_GLOO, None),
    (CHANGES_RDMA_SOCKETS, DIRECT_RDMA_SOCKETS, None),
    (GATHERED_BROADCAST, DIRECT, "at least 3"),
    (GATHERED_SHARED, DIRECT, "at least 3"),
    (GATHERED_BROADCAST, DIRECT_GLOO, None),
    (MEGATRON_CORE, DIRECT_TO_MEGATRON, None),
    (MEGATRON_CORE, DIRECT_GLOO_TO_MEGATRON, None),
)


@dataclass(frozen=True)
class Ratio:
    """Seconds of one contender divided by those of another, per round."""

    of_rounds: Sequence[float]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return median(self.of_rounds)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.of_rounds):.2f} to {max(self.of_rounds):.2f})"


@dataclass(frozen=True)
class Results:
    """The runs of one model."""

    model_bytes: int
    needed_bytes: int
    facts: Mapping[str, Facts]
    runs: Sequence[Run]

    def seconds(self, contender: str) -> dict[int, float]:
        """Round -> seconds."""
        return {run.round: run.timed.seconds for run in self.runs if run.contender == contender}

    def cpu_seconds(self, contender: str) -> float:
        """Median over the rounds of the CPU time of all ranks together."""
        return median(run.timed.cpu_seconds for run in self.runs if run.contender == contender)

    def ratio(self, slow: str, fast: str) -> Ratio | None:
        """The ratio of two contenders; None if one of them did not run."""
        one, other = self.seconds(slow), self.seconds(fast)
        return Ratio([one[number] / other[number] for number in one]) if one and other else None


def sentences(results: Results) -> Iterator[str]:
    """The important ratios, each with its target."""
    for slow, fast, aim in _COMPARED:
        if ratio := results.ratio(slow, fast):
            yield f"{slow}: {ratio} x the seconds of {fast}" + (f"; the aim is {aim}." if aim else ".")


def table(results: Results) -> Table:
    """The table in Markdown, with a row per contender."""
    made = Table(*_COLUMNS, box=box.MARKDOWN)
    for column in made.columns[1:]:
        column.justify = "right"
    for name, facts in results.facts.items():
        seconds = list(results.seconds(name).values())
        ratio = results.ratio(name, MEMCPY)
        made.add_row(
            name,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} to {max(seconds):.3f}",
            f"{results.needed_bytes / 1e9 / median(seconds):.2f}",
            f"{ratio.median:.2f}" if ratio else "-",
            f"{results.cpu_seconds(name):.3f}",
            f"{facts.moved_bytes / results.needed_bytes:.2f}",
            # These move their own buffers.
            *(["-"] * 2 if name in _BARE else _megabytes(facts.trainer_extra_bytes, facts.worker_extra_bytes)),
        )
    return made


def markdown(results: Results) -> str:
    """The table as wide as needed, with right-aligned numbers."""
    text = io.StringIO()
    Console(file=text, width=400).print(table(results))
    header, rule, *rows = (line for line in text.getvalue().splitlines() if line.strip())
    return "\n".join([header, rule.replace("-|", ":|").replace(":|", "-|", 1), *rows]) + "\n"


def _megabytes(*sizes: int) -> list[str]:
    return [f"{size / _MB:,.0f}" for size in sizes]
