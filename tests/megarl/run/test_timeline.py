"""The recorded step of a run, also where it fails and is done again in the same process."""

import io
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.autograd.profiler
from torch.profiler import record_function

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.output.places import PROFILES
from megarl.process.profiler import CUT, Profiler, _events, encoded
from megarl.run.timeline import Timeline, recorded_ranks


def test_a_step_that_failed_is_recorded_when_it_is_done_again(tmp_path):
    with pytest.raises(ConnectionError), Timeline(2, tmp_path, [], None, None).record(2):
        raise ConnectionError
    # The steps before it, which are done again first, would be recorded, too.
    assert not torch.autograd.profiler._is_profiler_enabled
    assert not (tmp_path / PROFILES).exists()
    # A resumed run makes a timeline of its own.
    with Timeline(2, tmp_path, [], None, None).record(2), record_function("again"):
        pass
    events = json.loads((tmp_path / PROFILES / "step_2.json").read_text())["traceEvents"]
    assert "again" in [event["name"] for event in events]


def test_engines_are_recorded_from_their_turn_on(tmp_path):
    """After a checkpoint it is the trainers', and after some refits; SGLang's workers cannot be called in it."""
    calls = []

    def stop(most_events, since_us):
        calls.append("stop")
        return {"engine": b""}

    engines = SimpleNamespace(start_profiler=lambda: calls.append("start"), stop_profiler=stop)
    gpus = SimpleNamespace(switch_to=calls.append)
    with Timeline(2, tmp_path, [], engines, None, gpus).record(2):
        gpus.switch_to("the trainer")
    assert calls == [engines, "start", "the trainer", engines, "stop"]


def group_of(ranks: int, **cut: int) -> SimpleNamespace:
    """Ranks of a model, whose workers are their numbers."""
    return SimpleNamespace(workers=list(range(ranks)), parallel=ParallelSizes(world_size=ranks, **cut))


def test_ranks_of_one_data_parallel_share_are_recorded_of_a_model_that_has_many() -> None:
    large = group_of(1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=8)
    assert recorded_ranks([large]) == [rank for stage in range(8) for rank in (128 * stage, 128 * stage + 1)]  # type: ignore[list-item]
    small, smaller = group_of(16, tensor_model_parallel_size=2), group_of(3)
    assert recorded_ranks([small, smaller]) == [*range(16), *range(3)]  # type: ignore[list-item]


def event(ts: float, name: str = "kernel") -> dict[str, object]:
    return {"name": name, "cat": "kernel", "ph": "X", "tid": 7, "dur": 1.0, "ts": ts, "args": {}}


def read(lines: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines.splitlines()]


def test_of_more_events_than_fit_the_earliest_are_kept_and_the_timeline_says_how_long_it_has_none() -> None:
    times = [float(1000 + number) for number in range(1000)]
    shuffled = random.Random(0).sample(times, 1000)
    all_of_them = read(encoded(map(event, shuffled), 1000, since_us=1000.0))
    assert [each["ts"] for each in all_of_them] == [each - 1000 for each in shuffled]
    *kept, cut = read(encoded(map(event, shuffled), 100, since_us=1000.0))
    assert sorted(each["ts"] for each in kept) == [each - 1000 for each in times[:100]]  # type: ignore[type-var]
    assert (cut["name"], cut["ts"], cut["dur"]) == (CUT, 99.0, 900.0)
    assert read(encoded([], 100, since_us=1000.0)) == []


@pytest.mark.parametrize("chunk", [1, 7, 100, 10_000])
def test_a_file_of_the_profiler_is_read_piece_by_piece(chunk: int) -> None:
    names = ["plain", 'in ], "quotes" {', "with \\ and\nline"]
    trace = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 5_000_000,
        "traceEvents": [
            {"ph": "M", "args": {"labels": [[]]}},
            *(event(float(n), each) for n, each in enumerate(names)),
        ],
        "traceName": "ends here",
    }
    whole = io.StringIO(json.dumps(trace, indent=1))
    few_at_once = SimpleNamespace(read=lambda _wanted: whole.read(chunk))
    found = list(_events(few_at_once))  # type: ignore[arg-type]
    assert [(each["name"], each["ts"]) for each in found] == [(each, 5000.0 + n) for n, each in enumerate(names)]
    with pytest.raises(json.JSONDecodeError):
        list(_events(io.StringIO(json.dumps(trace, indent=1)[:300])))


def test_an_event_that_torch_writes_wrongly_is_left_out() -> None:
    events = [event(float(n), name) for n, name in enumerate("abc")]
    text = json.dumps({"baseTimeNanoseconds": 0, "traceEvents": events, "traceName": ""}, indent=1)
    wrong = text.replace('"name": "b"', '"name": "b"c"')
    assert [each["name"] for each in _events(io.StringIO(wrong))] == ["a", "c"]


def test_an_event_that_had_begun_before_is_there_from_the_beginning_on() -> None:
    before, long_before = {**event(90.0, "a"), "dur": 25.0}, {**event(10.0, "b"), "dur": 1.0}
    found = read(encoded([before, long_before], 10, since_us=100.0))
    assert [(each["ts"], each["dur"]) for each in found] == [(0, 15), (0, 0)]


def test_the_timeline_names_each_process_and_is_whole_json(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start()
    with record_function("a {strange}, ] name"):
        pass
    lines = profiler.stop(1000, since_us=0.0)
    (own,) = (each for each in read(lines) if str(each["name"]).startswith("a {"))
    timeline = Timeline(2, tmp_path, [], None, None)
    found = {"controller": b"", "trainer_0": encoded([own, own], 10, 0.0), "engine_0": encoded([own], 10, 0.0)}
    for each in ({}, found):
        timeline._write(each)
        events = json.loads((tmp_path / PROFILES / "step_2.json").read_text())["traceEvents"]
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert names == list(each)
    done = [event for event in events if event["ph"] == "X"]
    assert done == [{**own, "pid": 1}, {**own, "pid": 1}, {**own, "pid": 2}]
