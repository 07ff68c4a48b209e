import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.tracking import Histogram, Run, read_history
from megarl.tracking.jsonl import JsonLinesLogger, each_step


def run(folder: Path, first_step: int, *, resumed: bool) -> Run:
    return Run(folder, first_step=first_step, last_step=100, resumed=resumed)


def log(logger: JsonLinesLogger, steps) -> None:
    for step in steps:
        logger.log(step, {"reward/mean": step / 7, "eval/accuracy": 0.5})


def test_every_step_is_one_object_on_the_disk_at_once(tmp_path):
    logger = JsonLinesLogger(run(tmp_path, 0, resumed=False))
    logger.log(0, {"eval/accuracy": 0.25})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "eval/accuracy": 0.25}\n'
    logger.log(1, {"reward/mean": 1.0})
    assert read_history(tmp_path) == [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward/mean": 1.0}]
    logger.close()


@given(
    steps=st.integers(0, 12),
    killed_after=st.integers(0, 12),
    resumed_from=st.integers(0, 12),
    half_line=st.sampled_from([b"", b'{"st', b'{"step": 1}']),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_resumed_file_equals_that_of_a_run_without_interruption(
    tmp_path, steps, killed_after, resumed_from, half_line
):
    first_step = min(resumed_from, killed_after)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    uninterrupted = JsonLinesLogger(run(whole, 0, resumed=False))
    log(uninterrupted, range(steps))
    uninterrupted.close()

    killed = JsonLinesLogger(run(cut, 0, resumed=False))
    log(killed, range(killed_after))
    killed.close()
    with (cut / "metrics.jsonl").open("ab") as file:
        file.write(half_line)
    resumed = JsonLinesLogger(run(cut, first_step, resumed=True))
    log(resumed, range(first_step, steps))
    resumed.close()

    expected = (whole / "metrics.jsonl").read_bytes()
    if first_step <= steps:
        assert (cut / "metrics.jsonl").read_bytes() == expected


def test_a_new_run_starts_a_new_file(tmp_path):
    for first_step in (0, 3):
        logger = JsonLinesLogger(run(tmp_path, first_step, resumed=False))
        log(logger, [first_step])
        logger.close()
    assert [line["step"] for line in read_history(tmp_path)] == [3]


def test_what_is_not_finite_is_null(tmp_path):
    logger = JsonLinesLogger(run(tmp_path, 0, resumed=False))
    logger.log(0, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": None, "b": None, "c": 1.0}


@pytest.mark.parametrize("line", ["text", "[1]", '{"reward/mean": 1}'])
def test_a_line_of_something_else_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is not a JSON object"):
        read_history(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        JsonLinesLogger(run(tmp_path, 5, resumed=True))
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("part", [b'{"st', b'{"step": 2}', b"\xc3"])
def test_a_line_that_is_being_written_is_not_read(tmp_path, part):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1}\n' + part)
    assert read_history(tmp_path) == [{"step": 0}, {"step": 1}]


def test_the_metrics_of_a_run_that_is_not_continued_are_kept(tmp_path, capfd):
    for value in (0.25, 0.5, 0.75):
        logger = JsonLinesLogger(run(tmp_path, 0, resumed=False))
        logger.log(0, {"eval/accuracy": value})
        logger.close()
    kept = {path.name: json.loads(path.read_text())["eval/accuracy"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 0.25, "metrics.2.jsonl": 0.5, "metrics.jsonl": 0.75}
    assert "metrics.jsonl is of an earlier run and is kept as metrics.2.jsonl" in capfd.readouterr().err


def test_nothing_is_kept_of_a_run_that_logged_nothing(tmp_path):
    for _ in range(2):
        JsonLinesLogger(run(tmp_path, 0, resumed=False)).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_numbered_things_are_written_as_their_counts_alone(tmp_path):
    logger = JsonLinesLogger(run(tmp_path, 1, resumed=False))
    logger.log(1, {"experts/load/layer_0": Histogram.of_numbered([6, 2]), "lengths": Histogram((0, 2, 4), (1, 0))})
    logger.close()
    (line,) = read_history(tmp_path)
    assert line == {
        "step": 1,
        "experts/load/layer_0": {"counts": [6, 2]},
        "lengths": {"edges": [0, 2, 4], "counts": [1, 0]},
    }


def test_a_long_history_is_never_in_memory_as_a_whole(tmp_path):
    line = json.dumps({"step": 1, "a": "x" * 2**20}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(line * 32)
    tracemalloc.start()
    assert sum(len(step["a"]) for step in each_step(tmp_path)) == 32 * 2**20
    JsonLinesLogger(run(tmp_path, 2, resumed=True)).close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
