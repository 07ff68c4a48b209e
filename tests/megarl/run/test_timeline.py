"""The recorded step of a run, also where it fails and is done again in the same process."""

import json
from types import SimpleNamespace

import pytest
import torch.autograd.profiler
from torch.profiler import record_function

from megarl.output.places import PROFILES
from megarl.run.timeline import Timeline


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

    def stop():
        calls.append("stop")
        return {"engine": []}

    engines = SimpleNamespace(start_profiler=lambda: calls.append("start"), stop_profiler=stop)
    gpus = SimpleNamespace(switch_to=calls.append)
    with Timeline(2, tmp_path, [], engines, None, gpus).record(2):
        gpus.switch_to("the trainer")
    assert calls == [engines, "start", "the trainer", engines, "stop"]
