"""Engines that hang in a refit, or of which a part is gone: it goes on without them."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from echo_kind import ECHO
from eventually import eventually
from test_restarts import EXPECTED, answered, back, states

import megarl.rollout
from megarl.refit.loader import LoaderPath
from megarl.schema import RefitConfig

pytestmark = [pytest.mark.usefixtures("shared_cluster"), pytest.mark.long]

LIMIT_S = 15


class Ranks:
    """Ranks that write nothing, since nobody reads it."""

    def dtypes(self):
        return {"weight": torch.float32}

    def map_segments(self, segments, segment_bytes):
        pass

    def write(self, bucket):
        pass


def through_the_loader(engines):
    model = SimpleNamespace(hf_shapes={"weight": (4,)})
    trainer = SimpleNamespace(weights=Ranks())
    return LoaderPath(trainer, engines, model, RefitConfig(path="loader", timeout_s=LIMIT_S))


def test_an_engine_that_hangs_in_its_loader_is_ended_and_the_others_have_the_weights(open_group, script, capsys):
    bounds = {"make_path": through_the_loader, "refit_timeout_s": LIMIT_S}
    with open_group(2, restarts=2, **bounds) as (engines, refit):
        refit(0)
        script("write", suffix=".hang")
        assert refit(1)["refit/repeated"] == 1
        assert answered(engines) == EXPECTED
        assert eventually(lambda: back(engines))
        script("map_segments", suffix=".hang")
        assert refit(2)["refit/repeated"] == 1
        assert eventually(lambda: back(engines))
        assert states(engines) == [("serving", 2, 0)] * 2
    said = capsys.readouterr().err
    for restart in (1, 2):
        assert f" gave no answer for {LIMIT_S} s; engine_" in said
        assert f"(restart {restart} of 2), and the others go on" in said


def test_one_that_hangs_as_it_gets_its_memory_back_is_ended_although_a_refit_keeps_others_from_asking_it(
    open_group, script, capsys
):
    with open_group(2, restarts=1, silence_timeout_s=10) as (engines, refit):
        refit(0)
        # The thread that asks engines between two steps is there.
        assert answered(engines) == EXPECTED
        engines.sleep()
        script("wake_up", suffix=".hang")
        with engines.undisturbed():
            engines.wake_up(["weights"])
        engines.wake_up(["kv_cache"])
        assert eventually(lambda: back(engines))
    said = capsys.readouterr().err
    assert " gave no answer for 10 s; engine_" in said
    assert "(restart 1 of 1), and the others go on" in said


def test_an_engine_of_which_a_part_dies_in_a_refit_is_known_to_be_dead_before_the_time_of_the_refit_is_over(
    open_group, script, capsys, monkeypatch
):
    living = replace(ECHO, part_class=("echo_engine", "LivingPart"), part_arguments=lambda _number, _first: {})
    monkeypatch.setitem(megarl.rollout.ENGINES, "echo", living)
    with open_group(1, restarts=1, nodes=2, refit_timeout_s=600) as (engines, refit):
        refit(0)
        script("commit_update", suffix=".hang")
        (part,) = engines.handles[0].parts
        threading.Timer(3, part.kill).start()
        began = time.monotonic()
        assert refit(1)["refit/repeated"] == 1
        assert time.monotonic() - began < 250
        assert states(engines) == [("serving", 1, 0)]
    assert "the process of engine_1 died; engine_0 is started again (restart 1 of 1)" in capsys.readouterr().err
