"""The table of `convert.py`: medians over the runs, and speeds relative to `cp` in the same round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.table import Table

from conversion.rounds import Run

CP = "cp + sync, 1 process"
"""The program that the others are compared with."""
_MB = 1e6
_COLUMNS = (
    "median over rounds",
    "seconds",
    "least to most",
    "MB/s",
    "/ cp (written)",
    "/ cp (read)",
    "whole command, s",
    "CPU s",
    "anonymous MB",
    "of one process",
)


@dataclass(frozen=True)
class Summary:
    """A phase of a program over all rounds; speeds that make no sense are None."""

    name: str
    seconds: Sequence[float]
    written_bytes_per_s: float | None
    written_over_cp: float | None
    """Bytes written per second divided by those of `cp` in the same round; the median of these ratios."""
    read_over_cp: float | None
    command_seconds: float
    cpu_seconds: float
    peak_anonymous_bytes: int
    peak_anonymous_bytes_of_a_process: int
    bytes_per_s: float


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary per phase of each program, in the order of their first runs in round 0."""
    cp = {run.round: run.written_bytes / run.phases[0].seconds for run in runs if run.program == CP}
    found: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        for number in range(len(run.phases)):
            found.setdefault((run.program, number), []).append(run)
    return [_summary(number, phase_runs, cp) for (_, number), phase_runs in found.items()]


def _summary(number: int, runs: Sequence[Run], cp: Mapping[int, float]) -> Summary:
    phases = [run.phases[number] for run in runs]
    written = [run.written_bytes / phase.seconds for run, phase in zip(runs, phases, strict=True) if phase.writes]
    read = [run.read_bytes / phase.seconds for run, phase in zip(runs, phases, strict=True) if phase.reads]
    rounds = [run.round for run in runs]
    return Summary(
        name=phases[0].name,
        seconds=[phase.seconds for phase in phases],
        written_bytes_per_s=median(written) if written else None,
        written_over_cp=_ratio(written, rounds, cp),
        read_over_cp=_ratio(read, rounds, cp),
        command_seconds=median(run.observation.seconds for run in runs),
        cpu_seconds=median(run.observation.cpu_seconds for run in runs),
        peak_anonymous_bytes=max(run.observation.peak_anonymous_bytes for run in runs),
        peak_anonymous_bytes_of_a_process=max(run.observation.peak_anonymous_bytes_of_a_process for run in runs),
        bytes_per_s=median(written or read),
    )


def _ratio(speeds: Sequence[float], rounds: Sequence[int], cp: Mapping[int, float]) -> float | None:
    if not speeds or not cp:
        return None
    return median(speed / cp[round_number] for speed, round_number in zip(speeds, rounds, strict=True))


def table(summaries: Sequence[Summary]) -> Table:
    """The table in Markdown, with a row per phase."""
    made = Table(*_COLUMNS, box=box.MARKDOWN)
    for column in made.columns[1:]:
        column.justify = "right"
    for each in summaries:
        made.add_row(
            each.name,
            f"{median(each.seconds):.2f}",
            f"{min(each.seconds):.2f} to {max(each.seconds):.2f}",
            f"{each.bytes_per_s / _MB:,.0f}",
            "-" if each.written_over_cp is None else f"{each.written_over_cp:.2f}",
            "-" if each.read_over_cp is None else f"{each.read_over_cp:.2f}",
            f"{each.command_seconds:.2f}",
            f"{each.cpu_seconds:.2f}",
            f"{each.peak_anonymous_bytes / _MB:,.0f}",
            f"{each.peak_anonymous_bytes_of_a_process / _MB:,.0f}",
        )
    return made
