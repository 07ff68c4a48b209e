"""The table of `step.py`: medians over the runs, and the other programs relative to the first."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from observation import Observation
from rich import box
from rich.table import Table

_STAGES = ("rollout", "reward", "log_probs", "advantage", "update", "refit", "overhead")

Row = tuple[str, str, Callable[[Observation], float | None]]


def _stage(name: str) -> Callable[[Observation], float | None]:
    return lambda run: run.stage_seconds.get(name)


_ROWS: tuple[Row, ...] = (
    *((f"{name}, s", "{:.3f}", _stage(name)) for name in _STAGES),
    ("step, s", "{:.3f}", lambda run: run.wall_seconds_per_step),
    ("CPU seconds a step", "{:.3f}", lambda run: run.cpu_seconds_per_step),
    ("tokens a step", "{:,.0f}", lambda run: run.tokens_per_step),
    ("tokens/s", "{:,.0f}", lambda run: run.tokens_per_s),
    ("tokens per CPU second", "{:,.0f}", lambda run: run.tokens_per_step / run.cpu_seconds_per_step),
    ("peak memory, MiB", "{:,.0f}", lambda run: run.peak_memory_bytes / 2**20),
    ("mean reward", "{:.3f}", lambda run: run.reward_mean),
)
"""Name of a row, format of its numbers, and its value in a run (None: not reported by the program)."""


def step_table(observations: Mapping[str, Sequence[Observation]]) -> Table:
    """The table in Markdown, with a row per quantity and a column per program."""
    table = Table("median over runs", *observations, box=box.MARKDOWN)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, shape, value in _ROWS:
        cells = []
        for runs in observations.values():
            values = [found for run in runs if (found := value(run)) is not None]
            cells.append(shape.format(median(values)) if values else "-")
        table.add_row(name, *cells)
    return table


_RATIOS: tuple[tuple[str, Callable[[Observation], float]], ...] = (
    ("seconds a token", lambda run: 1 / run.tokens_per_s),
    ("CPU seconds a token", lambda run: run.cpu_seconds_per_step / run.tokens_per_step),
)
"""Compared costs, per token and not per step, as responses differ slightly in length."""


def ratios(observations: Mapping[str, Sequence[Observation]]) -> list[str]:
    """A sentence per program after the first and entry of `_RATIOS`: its cost divided by the first program's."""
    (first, first_runs), *others = observations.items()
    return [
        _ratio_sentence(what, f"{name} / {first}", [value(run) for run in runs], [value(run) for run in first_runs])
        for name, runs in others
        for what, value in _RATIOS
    ]


def _ratio_sentence(what: str, programs: str, others: Sequence[float], firsts: Sequence[float]) -> str:
    ratio = median(others) / median(firsts)
    pairs = ", ".join(f"{other / own:.2f}" for other, own in zip(others, firsts, strict=True))
    return f"{what}, {programs}: {ratio:.2f} (run by run: {pairs})"
