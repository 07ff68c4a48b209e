"""Draws a forecast: who sends how much to whom, and how long every port is busy."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.forecast import Forecast

_INK, _GRID = "#33363d", "#e4e6ea"
_COLOURS = {"nic_out": "#2f6fb7", "nic_in": "#d9762b", "nvlink_out": "#2a9d6f", "nvlink_in": "#a05fb0"}
_NAMES = {"nic_out": "NIC out", "nic_in": "NIC in", "nvlink_out": "NVLink out", "nvlink_in": "NVLink in"}
_FLOW = LinearSegmentedColormap.from_list("flow", ["#ffffff", "#9cc3e6", "#2f6fb7", "#0d2c54"])
_MB = 1e6
_MOST_TICKS = 17


def draw_forecast(forecast: Forecast) -> Figure:
    """Return a figure of the bytes from each source rank to each destination rank, and the seconds of each port."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=(15, 7.2), dpi=120, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    flow, ports = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
    _draw_flow(figure, flow, forecast)
    _draw_ports(ports, forecast)
    return figure


def _draw_flow(figure: Figure, axes: Axes, forecast: Forecast) -> None:
    refit, direct = forecast.refit, forecast.traffic.direct / _MB
    # Attention is small compared to experts, but its senders should be visible.
    norm = PowerNorm(0.4, vmin=0, vmax=max(1.0, float(direct.max())))
    image = axes.imshow(direct, cmap=_FLOW, aspect="auto", interpolation="nearest", norm=norm)
    figure.colorbar(
        image, ax=axes, label="MB from a source to a destination", shrink=0.6, pad=0.02
    ).outline.set_visible(False)
    stages = refit.trainer.pipeline_model_parallel_size
    _mark_groups(axes, "y", len(direct), stages)
    _mark_groups(axes, "x", direct.shape[1], refit.replicas)
    axes.set_ylabel(f"trainer rank ({stages} pipeline stages)" if stages > 1 else "trainer rank", color=_INK)
    axes.set_xlabel(f"engine rank ({refit.replicas} engines of {refit.engine.world_size})", color=_INK)
    _finish(axes, f"Who sends to whom: {refit.architecture.model_type}, {_say(refit.trainer)} to {_say(refit.engine)}")


def _mark_groups(axes: Axes, side: str, ranks: int, groups: int) -> None:
    """Ticks and thin lines where each group of ranks begins, as far as there is room."""
    size = ranks // groups
    step = size * -(-groups // _MOST_TICKS)
    begins = np.arange(0, ranks, step)
    (axes.set_yticks if side == "y" else axes.set_xticks)(begins - 0.5, [str(begin) for begin in begins])
    draw = axes.axhline if side == "y" else axes.axvline
    for begin in begins[1:]:
        draw(begin - 0.5, color=_INK, linewidth=0.4, alpha=0.35)


def _draw_ports(axes: Axes, forecast: Forecast) -> None:
    busy = forecast.ports.seconds(forecast.refit.cluster.rates)
    gpus = np.arange(forecast.traffic.topology.gpus + 1)
    for kind, seconds in busy.items():
        if seconds.any():
            axes.stairs(
                seconds,
                gpus,
                color=_COLOURS[kind],
                fill=True,
                alpha=0.25 if kind.startswith("nic") else 0.5,
                linewidth=0,
            )
            axes.stairs(seconds, gpus, color=_COLOURS[kind], linewidth=1.2, label=_NAMES[kind], baseline=None)
    marks = (
        ("lower bound", forecast.lower_bound_seconds, _INK, "--", "top"),
        ("simulated", forecast.replay.seconds, "#b3261e", "-", "bottom"),
    )
    for name, height, colour, style, place in marks:
        axes.axhline(height, color=colour, linewidth=1.2, linestyle=style)
        axes.annotate(
            f"{name} {height:.3f} s",
            (0, height),
            xytext=(4, -3 if place == "top" else 3),
            textcoords="offset points",
            va=place,
            color=colour,
            fontsize=9,
            fontweight="bold",
        )
    axes.set_xlim(0, gpus[-1])
    axes.set_ylim(0, 1.12 * max(forecast.replay.seconds, forecast.transfer_seconds, 1e-9))
    axes.set_xlabel(_gpu_label(forecast), color=_INK)
    axes.set_ylabel("seconds for which a port is busy", color=_INK)
    axes.grid(color=_GRID, linewidth=0.8, axis="y")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, ncols=4, loc="upper right", labelcolor=_INK)
    port = forecast.binding_port
    _finish(axes, f"Load of every port; busiest: {_NAMES[port.kind]} of GPU {port.gpu}, {port.seconds:.3f} s")


def _gpu_label(forecast: Forecast) -> str:
    refit, first = forecast.refit, forecast.traffic.topology.destination_gpu[0]
    where = "the engines' among them" if refit.colocated else f"the engines' from {first} on"
    return f"GPU ({refit.trainer.world_size} of the trainer, {where})"


def _say(parallel: ParallelSizes) -> str:
    sizes = (
        ("TP", parallel.tensor_model_parallel_size),
        ("PP", parallel.pipeline_model_parallel_size),
        ("EP", parallel.expert_model_parallel_size),
    )
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=10)
    axes.tick_params(colors=_INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
