import importlib.metadata
import io
import json
import platform

import pytest
from matplotlib.image import imread
from rich.console import Console

from megarl.tracking.curves import PANELS, draw_curves
from megarl.tracking.report import report_table, write_report
from megarl.tracking.versions import versions

METRICS = [curve.metric for panel in PANELS for curve in panel.curves]


def history(steps):
    return [{"step": step, **dict.fromkeys(METRICS, 1 / (step + 2))} for step in range(steps)]


def lines(figure):
    return {tuple(line.get_xdata()): tuple(line.get_ydata()) for axes in figure.axes for line in axes.lines}


def test_a_report_is_a_picture_and_a_summary(tmp_path):
    paths = write_report(tmp_path / "new", history(30), {"accuracy": {"first": 0.25, "last": 0.75}})
    assert imread(paths.curves).shape[2] == 4
    assert imread(paths.curves).std() > 0.01
    summary = json.loads(paths.summary.read_text())
    assert summary == {"accuracy": {"first": 0.25, "last": 0.75}, "versions": versions()}
    assert sorted(path.name for path in paths.curves.parent.iterdir()) == ["curves.png", "summary.json"]


def test_a_report_that_fails_leaves_the_older_one(tmp_path):
    paths = write_report(tmp_path, history(2), {"run": 1})
    older = paths.summary.read_bytes(), paths.curves.read_bytes()
    with pytest.raises(TypeError):
        write_report(tmp_path, history(2), {"run": object()})
    with pytest.raises(KeyError):
        write_report(tmp_path, [{"eval/accuracy": 1.0}], {"run": 1})
    assert (paths.summary.read_bytes(), paths.curves.read_bytes()) == older
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("steps", [0, 1, 2, 50])
def test_curves_of_any_length_are_drawn(tmp_path, steps):
    write_report(tmp_path, history(steps), {})


def test_a_step_without_a_metric_is_left_out_of_its_line():
    figure = draw_curves(
        [
            {"step": 0, "eval/accuracy": 0.25},
            {"step": 1, "log_prob_difference/max": None},
            {"step": 2, "eval/accuracy": 0.5, "log_prob_difference/max": 0.0},
        ]
    )
    assert lines(figure) == {(0, 2): (0.25, 0.5), (2,): (0.0,)}
    assert [text.get_text() for text in figure.axes[1].texts] == ["not logged"]


def test_the_end_of_each_line_is_its_last_value():
    figure = draw_curves([{"step": 0, "eval/accuracy": 0.25}, {"step": 5, "eval/accuracy": 0.875}])
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.875"]


def test_a_smoothed_curve_starts_at_its_first_value_and_ignores_a_constant():
    figure = draw_curves([{"step": step, "reward/mean": 0.5} for step in range(5)])
    drawn, smoothed = figure.axes[1].lines
    assert list(drawn.get_ydata()) == pytest.approx([0.5] * 5)
    assert list(smoothed.get_ydata()) == pytest.approx([0.5] * 5)


def test_versions_are_those_installed():
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["megatron-core"] == importlib.metadata.version("megatron-core")
    assert all(found.values())


def test_the_end_table_shows_results_and_paths(tmp_path):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table("Quickstart", {"accuracy": 0.8512345, "steps": 120}, {"summary": tmp_path / "s.json"}))
    shown = console.export_text()
    for part in ("Quickstart", "accuracy", "0.8512", "120", str(tmp_path / "s.json")):
        assert part in shown
