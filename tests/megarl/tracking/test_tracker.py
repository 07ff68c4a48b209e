import re
from pathlib import Path

import numpy as np
import pytest

from converters.errors import UserError
from megarl.tracking import LOGGERS, Histogram, Run, Tracker, open_tracker, read_history
from megarl.tracking.metrics import METRICS


class Recorder:
    def __init__(self, error=None):
        self.lines, self.closed, self.failed, self.error = [], False, None, error

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))

    def close(self, *, failed=False):
        self.closed, self.failed = True, failed
        if self.error:
            raise self.error


def test_every_logger_gets_plain_numbers():
    loggers = [Recorder(), Recorder()]
    with Tracker(loggers) as tracker:
        tracker.log(3, {"reward/mean": np.float32(0.5), "reward/dropped": 2})
    for logger in loggers:
        assert logger.lines == [(3, {"reward/mean": 0.5, "reward/dropped": 2.0})]
        assert {type(value) for value in logger.lines[0][1].values()} == {float}
        assert logger.closed


def test_every_logger_takes_a_histogram_and_the_console_shows_none(tmp_path, capsys):
    lengths = Histogram((0.5, 2.5, 4.5), (3, 1))
    with open_tracker(["jsonl", "console", "tensorboard"], Run(tmp_path, first_step=1, last_step=1)) as tracker:
        tracker.log(1, {"reward/mean": 0.5, "response_length/histogram": lengths})
    (line,) = read_history(tmp_path)
    assert line == {
        "step": 1,
        "reward/mean": 0.5,
        "response_length/histogram": {"edges": [0.5, 2.5, 4.5], "counts": [3, 1]},
    }
    assert capsys.readouterr().out.split() == ["step", "1/1", "reward", "0.500"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_loggers_are_closed_when_one_fails(failing):
    loggers = [Recorder(OSError("full") if place == failing else None) for place in range(3)]
    with pytest.raises(OSError, match="full"):
        Tracker(loggers).close()
    assert all(logger.closed for logger in loggers)


def test_closing_twice_is_closing_once():
    tracker = Tracker([Recorder(), logger := Recorder()])
    tracker.close()
    logger.closed = False
    tracker.close()
    assert not logger.closed


def test_loggers_are_opened_by_name(tmp_path, capsys):
    with open_tracker(["jsonl", "console"], Run(tmp_path / "new", first_step=0, last_step=1)) as tracker:
        tracker.log(0, {"reward/mean": 0.5})
    assert read_history(tmp_path / "new") == [{"step": 0, "reward/mean": 0.5}]
    assert "reward 0.500" in capsys.readouterr().out


def test_an_unknown_logger_is_refused_before_any_is_opened(tmp_path):
    with pytest.raises(UserError, match=r"'tensorbord'; did you mean tensorboard\?; the loggers are console"):
        open_tracker(["jsonl", "tensorbord"], Run(tmp_path / "new", 0, 1))
    assert not (tmp_path / "new").exists()


def test_the_registry_has_the_documented_loggers():
    documented = Path(__file__).parents[3] / "megarl/schema/config.py"
    names = re.search(r"`megarl\.tracking\.LOGGERS`: ([\w, ]+)\.", documented.read_text()).group(1)
    assert set(names.split(", ")) == set(LOGGERS)


def test_metric_names_are_unique_and_well_formed():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z_]+(/([a-z0-9_]|<[a-z]+>)+)+", name) for name in names)
