"""Trainer and engines that take turns on the same devices: the numbers of a run in which each has its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import without_timings
from safetensors.torch import load_file
from test_main_job import make_config

from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import WorkerFailed
from megarl.output.places import EXPORT
from megarl.rollout.protocol import Engine
from megarl.run.job import Job, open_job
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig, PoolConfig
from megarl.tracking.clock import Clock
from megarl.train import train_step
from megatron_ext.memory.device_memory import DeviceFullError

pytestmark = pytest.mark.usefixtures("shared_cluster")

STEPS = 3
MIB = 2**20
# Trainer and engine have more than half of this each.
DEVICE_BYTES = 14 * MIB
OF_SPEED = ("schedule/", "engines/")
"""Further metrics that depend on how fast somebody is, as how far the next batch has come does."""
SHARED = PoolConfig(["trainer", "engine"], nodes=1, shared=True)


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_taking_turns_changes_no_bit_and_halves_the_memory(
    max_staleness: int, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    config = small(tmp_path)
    config.schedule.max_staleness = max_staleness
    with open_job(RunSetup.read(config, "train")) as job:
        _, *expected = steps(job)
        job.export()
    weights = exported(config)
    config.cluster.pools, config.cluster.device_memory_bytes = {"all": SHARED}, DEVICE_BYTES
    config.output_dir = str(tmp_path / "colocated")
    # It goes on from the checkpoint of a run that did not take turns.
    copy_checkpoint(tmp_path / "run", tmp_path / "colocated", step=1)
    capfd.readouterr()
    with open_job(RunSetup.read(config, "train")) as job:
        said = capfd.readouterr().err
        assert "trainer 0 and engine 0 in turns" in said
        assert ("schedule.max_staleness=1 makes tokens older and nothing faster" in said) == bool(max_staleness)
        found = steps(job)
        job.export()
        refuses_both_at_once(job)
    every_peak = []
    for line, own in zip(found, expected, strict=True):
        peaks = {name: line.pop(name) for name in list(line) if name.startswith("memory/")}
        every_peak.append(peaks)
        assert line.pop("seconds/turns") > 0
        assert set(peaks) == {"memory/engines", "memory/trainers", "memory/refit"}
        assert max(peaks.values()) < DEVICE_BYTES < peaks["memory/engines"] + peaks["memory/trainers"]
        assert peaks["memory/refit"] < 0.6 * peaks["memory/trainers"]
        assert without_timings(line, *OF_SPEED) == without_timings(own, *OF_SPEED)
    # The start, in which engines were alone, is none of the first step.
    assert every_peak[0] == every_peak[1]
    for name, tensor in exported(config).items():
        assert torch.equal(tensor, weights[name]), name


def small(folder: Path) -> MegarlConfig:
    config = make_config("qwen3", folder)
    config.loop.steps, config.loop.prompts_per_step, config.rollout.max_response_tokens = STEPS, 4, 8
    config.checkpoint.keep_last = STEPS
    # All weights are trained: an adapter's gradients and state would fit beside the engine.
    config.lora.rank = 0
    config.cluster.trainer_ranks, config.megatron["tensor_model_parallel_size"] = 1, 1
    config.rollout.engine_args["kv_cache_memory_bytes"] = 8 * MIB
    config.rollout.engine_args["block_size"] = 32
    config.algorithm.kl_coefficient = 0.1
    return config


def steps(job: Job) -> list[dict[str, Any]]:
    """The metrics of each step to the last, with a checkpoint after it."""
    job.refit(job.state.step)
    clock = Clock()
    metrics = []
    while job.state.step < STEPS:
        metrics.append(train_step(job, clock))
        job.save()
    return metrics


def copy_checkpoint(run: Path, other: Path, step: int) -> None:
    """Begin another run with a checkpoint of this one."""
    checkpoint = Path("checkpoints", f"iter_{step:07d}")
    shutil.copytree(run / checkpoint, other / checkpoint)
    (other / "metrics.jsonl").write_text("")


def refuses_both_at_once(job: Job) -> None:
    """After the export it is the trainers' turn: nothing else fits, and nothing can be asked of the engine."""
    waking = job.engines.begin(Engine.wake_up, ["kv_cache", "weights"])
    with pytest.raises(DeviceFullError, match=r"the kv_cache of an engine, .* do not fit beside"):
        wait(waking)
    job.gpus.switch_to(job.engines)
    with pytest.raises(WorkerFailed, match=r"it is not the trainers' turn"):
        job.trainer.weights.write(None)


def exported(config: MegarlConfig) -> dict[str, torch.Tensor]:
    (file,) = Path(config.output_dir, EXPORT).glob("*.safetensors")
    return load_file(file)
