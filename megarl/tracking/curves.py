"""Draws the curves of a run as one picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

History = Sequence[Mapping[str, Any]]

_INK, _GRID = "#33363d", "#e4e6ea"
_BLUE, _GREEN, _ORANGE, _GRAY = "#2f6fb7", "#2a9d6f", "#d9762b", "#8a909c"
_SMOOTHING = 0.8


@dataclass(frozen=True)
class Curve:
    """One line of a panel: a metric, a label at its end if the panel has several lines, and its style."""

    metric: str
    color: str
    label: str = ""
    smoothed: bool = False
    markers: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot over the steps."""

    title: str
    curves: tuple[Curve, ...]
    share: bool = False
    """Whether values are between 0 and 1."""
    logarithmic: bool = False


PANELS = (
    Panel("Held-out accuracy", (Curve("eval/accuracy", _GREEN, markers=True),), share=True),
    Panel("Mean reward of the samples", (Curve("reward/mean", _BLUE, smoothed=True),)),
    Panel("Policy entropy (nats per token)", (Curve("policy/entropy", _ORANGE, smoothed=True),)),
    Panel(
        "|engine - trainer| log-probability (nats)",
        (
            Curve("log_prob_difference/max", _GRAY, "max "),
            Curve("log_prob_difference/mean", _BLUE, "mean "),
        ),
        logarithmic=True,
    ),
)


def draw_curves(history: History) -> Figure:
    """Return a figure with one plot per panel, two in a row, over the "step" of the `history`.

    Steps where a metric is missing or None are left out of its line.
    """
    rows = (len(PANELS) + 1) // 2
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(11, 3.6 * rows), dpi=150, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, 2, squeeze=False, sharex=True).flat, PANELS, strict=False):
        _draw(axes, panel, history)
    return figure


def _draw(axes: Axes, panel: Panel, history: History) -> None:
    for curve in panel.curves:
        _draw_curve(axes, curve, history)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=10)
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0, labelbottom=True)
    for side in axes.spines.values():
        side.set_visible(False)
    if not axes.lines:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=_GRAY)
        return
    if panel.share:
        axes.set_ylim(0, 1)
    # A logarithmic axis cannot show 0, the difference of two identical computations.
    if panel.logarithmic and any(np.any(np.asarray(line.get_ydata(), dtype=float) > 0) for line in axes.lines):
        axes.set_yscale("log", nonpositive="mask")
        axes.minorticks_off()


def _draw_curve(axes: Axes, curve: Curve, history: History) -> None:
    points = [(line["step"], line[curve.metric]) for line in history if line.get(curve.metric) is not None]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    width, alpha = (1.0, 0.35) if curve.smoothed else (1.8, 1.0)
    axes.plot(
        steps,
        values,
        color=curve.color,
        linewidth=width,
        alpha=alpha,
        marker="o" if curve.markers or len(points) == 1 else None,
        markersize=4,
    )
    if curve.smoothed:
        axes.plot(steps, _smooth(values), color=curve.color, linewidth=2.0)
    last = _smooth(values)[-1] if curve.smoothed else values[-1]
    axes.annotate(
        f"{curve.label}{last:.2g}" if last < 0.01 else f"{curve.label}{last:.3f}",
        (steps[-1], last),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=curve.color,
        fontsize=9,
        fontweight="bold",
        annotation_clip=False,
    )


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, corrected for its start as in Adam."""
    averages, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        averages.append(average / (1 - _SMOOTHING**count))
    return averages
