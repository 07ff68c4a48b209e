"""Engines that sample ahead in turns with the trainer and die, in any moment of a step: nothing is lost or repeated."""

import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
import torch
from dying_engine import die_after_steps
from eventually import eventually
from test_colocated_ahead import Step, check
from test_colocated_engines_die import kill, numbers, run_in
from test_colocation import DEVICE_BYTES, MIB, SHARED, STEPS, exported, small

import megarl.train
from megarl.output.places import EXPORT, LOGS
from megarl.process.writers import other_writers
from megarl.run.job import Job, open_job
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")

PROMPTS = 6


class Deaths(NamedTuple):
    """Engines that die, by their numbers, at four moments: of a step, or before or after a version is there.

    Example: Deaths(sampling={0: 1}, refit={2: 0}) is engine 1 in the first rollout, and engine 0 as it gets version 2.
    """

    sampling: Mapping[int, int] = {}
    asleep: Mapping[int, tuple[int, ...]] = {}
    refit: Mapping[int, int] = {}
    evaluating: Mapping[int, int] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        asleep = sum(len(each) for each in self.asleep.values())
        return len(self.sampling) + asleep + len(self.refit) + len(self.evaluating)


ALONE = Deaths(sampling={0: 0}, asleep={0: (0,)}, refit={2: 0}, evaluating={2: 0})
AMONG_TWO = Deaths(sampling={0: 0}, asleep={0: (0, 1)}, refit={2: 1}, evaluating={2: 0})
NOBODY = Deaths()


def in_turns(folder: Path, replicas: int, staleness: int, in_flight: str) -> MegarlConfig:
    config = small(folder)
    config.loop.prompts_per_step, config.loop.eval_every = PROMPTS, 2
    config.rollout.replicas, config.rollout.max_response_tokens = replicas, 96
    # Few at once, so that there is something in flight at any moment.
    config.rollout.engine_args |= {"max_model_len": 112, "max_num_seqs": 4, "kv_cache_memory_bytes": 3 * MIB}
    config.schedule.max_staleness, config.schedule.in_flight = staleness, in_flight
    config.cluster.pools, config.cluster.device_memory_bytes = {"all": SHARED}, DEVICE_BYTES
    return config


class Run:
    """Steps of a job in which engines die as told."""

    def __init__(self, config: MegarlConfig, deaths: Deaths, monkeypatch: pytest.MonkeyPatch) -> None:
        self._config, self._deaths = config, deaths
        self.found: list[Step] = []
        config.cluster.max_engine_restarts = deaths.count
        self._evaluate = megarl.train._evaluate
        self._monkeypatch = monkeypatch

    def __call__(self, versions: Path | None = None) -> list[Step]:
        """All steps; the weights of each version are left in `versions`, in a folder of its number."""
        with self._monkeypatch.context() as patched, open_job(RunSetup.read(self._config, "train")) as job:
            patched.setattr(megarl.train, "_evaluate", self._evaluated)
            taken, take = [], job.rollouts.take
            patched.setattr(job.rollouts, "take", lambda clock: taken.append(take(clock)) or taken[-1])
            refit = functools.partial(self._refit, job)
            refit.mark_outdated = job.refit.mark_outdated  # type: ignore[attr-defined]
            disturbed, clock = replace(job, refit=refit), Clock()
            job.refit(0)
            while (version := job.state.step) < STEPS:
                if version in self._deaths.sampling:
                    # In mid-response, whose tokens were told of.
                    run_in(job.engines, self._deaths.sampling[version], die_after_steps, 30)
                metrics = train_step(disturbed, clock)
                self.found.append(Step(version, taken[-1].groups, metrics))
                if versions is not None:
                    job.export()
                    shutil.copytree(Path(self._config.output_dir, EXPORT), versions / str(version + 1))
            job.export()
        return self.found

    def _refit(self, job: Job, version: int) -> dict[str, float]:
        for number in self._deaths.asleep.get(version - 1, ()):
            kill(job.engines, number)
        if version in self._deaths.refit:
            run_there(job, self._deaths.refit[version], die_in_refit)
        return job.refit(version)

    def _evaluated(self, job: Job) -> dict[str, float]:
        if job.state.step in self._deaths.evaluating:
            job.gpus.switch_to(job.engines)
            run_in(job.engines, self._deaths.evaluating[job.state.step], die_after_steps, 20)
        return self._evaluate(job)


def run_there(job: Job, number: int, function: Callable[[], None]) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    run_in(job.engines, number, function)


def die_in_refit() -> None:
    """In this process: as the next weights come."""
    from megarl.rollout.owned_engine import OwnedEngine

    def die(self: OwnedEngine, version: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    OwnedEngine.receive = OwnedEngine.write = die


@pytest.mark.long
@pytest.mark.timeout(900)
def test_with_wait_no_bit_is_another(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_turns(tmp_path, replicas=1, staleness=1, in_flight="wait")
    expected = Run(config, NOBODY, monkeypatch)()
    weights = exported(config)
    config.output_dir = str(tmp_path / "disturbed")
    found = Run(config, ALONE, monkeypatch)()
    check_that_all_died(config, ALONE, capfd.readouterr().err)
    for step, own in zip(found, expected, strict=True):
        assert [group.ordinal for group in step.groups] == [group.ordinal for group in own.groups]
        assert numbers(step.metrics) == numbers(own.metrics)
    for name, tensor in exported(config).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.long
@pytest.mark.timeout(900)
def test_with_recompute_each_token_is_of_its_version_and_none_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_turns(tmp_path, replicas=2, staleness=2, in_flight="recompute")
    versions = tmp_path / "versions"
    shutil.copytree(config.model.path, versions / "0")
    found = Run(config, AMONG_TWO, monkeypatch)(versions)
    check_that_all_died(config, AMONG_TWO, capfd.readouterr().err)
    check(found, range(STEPS), versions, prompts=PROMPTS, staleness=2)


def check_that_all_died(config: MegarlConfig, deaths: Deaths, said: str) -> None:
    """Check that engines died as told, and that of all processes none is left."""
    # An engine may die before it has weights again.
    assert said.count(" is started again (restart ") + said.count(" did not come back (") == deaths.count
    assert " had not answered " in said
    logs = list(Path(config.output_dir, LOGS).glob("*.log"))
    assert logs
    assert eventually(lambda: not any(list(other_writers(log.resolve())) for log in logs))
