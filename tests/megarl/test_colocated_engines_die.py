"""Engines that take turns with the trainer and die, asleep and awake: others take their place, to the same numbers."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import dying_engine
import pytest
import ray
import torch
from dying_engine import die_after_steps
from equal_runs import without_timings
from test_colocation import DEVICE_BYTES, MIB, OF_SPEED, SHARED, STEPS, exported, small

from megarl.cluster.engines.engine_group import EngineGroup
from megarl.refit.engine_start import EngineStart
from megarl.refit.refit import Refit
from megarl.run.job import Job, open_job
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")

REPLICAS = 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_engines_killed_asleep_and_while_they_sample_come_back_and_no_bit_is_another(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_turns(tmp_path)
    with open_job(RunSetup.read(config, "train")) as job:
        expected = steps(job, Undisturbed())
        job.export()
    weights = exported(config)
    config.output_dir = str(tmp_path / "disturbed")
    capfd.readouterr()
    finish = EngineStart.finish

    def kill_and_finish(start: EngineStart) -> Refit:
        kill(start._engines, 1)
        return finish(start)

    # In the start of the run, when the trainer reads its weights.
    monkeypatch.setattr(EngineStart, "finish", kill_and_finish)
    with open_job(RunSetup.read(config, "train")) as job:
        found = steps(job, Disturbed())
        job.export()
    said = capfd.readouterr().err
    # One in whose place another samples, then both in the trainers' turn, then one for which nobody waits.
    assert said.count(" had not answered ") == 1
    # The last one may have had no weights yet.
    failed = accumulate(line["engines/failed_starts"] for line in found)
    assert [line["engines/restarts"] + each for line, each in zip(found, failed, strict=True)] == [2, 4, 5]
    for line, own in zip(found, expected, strict=True):
        assert max(value for name, value in line.items() if name.startswith("memory/")) < DEVICE_BYTES
        assert numbers(line) == numbers(own)
    for name, tensor in exported(config).items():
        assert torch.equal(tensor, weights[name]), name


def in_turns(folder: Path) -> MegarlConfig:
    config = small(folder)
    config.rollout.replicas, config.rollout.engine_args["kv_cache_memory_bytes"] = REPLICAS, 3 * MIB
    config.cluster.pools, config.cluster.device_memory_bytes = {"all": SHARED}, DEVICE_BYTES
    config.cluster.max_engine_restarts = 5
    return config


class Undisturbed:
    """Nothing happens, at two moments of each step."""

    def before(self, job: Job) -> None:
        """Before a step, when the engines have their weights and no keys and values."""

    def asleep(self, job: Job) -> None:
        """When the trainer has learned, and the engines have nothing."""


class Disturbed(Undisturbed):
    """In the first step an engine is killed that samples, in the second all that sleep, one before the third."""

    def before(self, job: Job) -> None:
        if job.state.step == 0:
            run_in(job.engines, 0, die_after_steps, 3)
        if job.state.step == 2:
            kill(job.engines, 1)

    def asleep(self, job: Job) -> None:
        if job.state.step == 2:
            for number in range(REPLICAS):
                kill(job.engines, number)


def steps(job: Job, disturbance: Undisturbed) -> list[dict[str, Any]]:
    """The metrics of all steps."""

    def refit(version: int) -> dict[str, float]:
        disturbance.asleep(job)
        return job.refit(version)

    refit.mark_outdated = job.refit.mark_outdated  # type: ignore[attr-defined]
    disturbed, clock = replace(job, refit=refit), Clock()
    job.refit(0)
    metrics = []
    for _ in range(STEPS):
        disturbance.before(job)
        metrics.append(train_step(disturbed, clock))
    return metrics


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics that are not of the time, nor of what went into the engines."""
    return without_timings(metrics, *OF_SPEED, "memory/", "refit/")


def kill(engines: EngineGroup, number: int) -> None:
    """Kill the process of an engine; that is heard of, or not yet."""
    with pytest.raises(ray.exceptions.RayActorError):
        run_in(engines, number, os._exit, 7)


def run_in(engines: EngineGroup, number: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in the process of an engine, whose program does not know."""
    for module in (dying_engine, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    worker = engines.handles[number].worker
    ray.get(worker.actor.__ray_call__.remote(lambda _: function(*arguments)))
