"""A whole job whose engine is SGLang's, over a server with its rules and over its own: refits, and a killed server."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from eventually import descendants
from safetensors.torch import load_file

from megarl.cluster.ray.runtime import ray_cluster
from megarl.config.compose import compose
from megarl.output.places import ADAPTER, EXPORT, PROFILES
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.sglang import engine, installation
from megarl.rollout.sglang.kind import VERSIONS
from megarl.run.job import open_job
from megarl.run.opening import RunSetup
from megarl.schema import ClusterConfig, PoolConfig
from megarl.tracking.clock import Clock
from megarl.train import train_step

SEEN = "base_model.model.model.layers.0.mlp.gate_proj"
"""The one matrix of which the stand-in sees an adapter."""
OWN_SERVER = "megarl.rollout.sglang.server"
"""The module that a real server runs."""
STAND_IN = Path(__file__).parents[1] / "rollout" / "sglang_stand_in.py"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program that takes the place of the Python that has SGLang, in all processes of a cluster that comes after."""
    program = tmp_path / "python"
    version = f'[ "$1" = -c ] && echo {VERSIONS[0]} && exit'
    program.write_text(f'#!/bin/sh\n{version}\nPYTHONSAFEPATH= exec {sys.executable} {STAND_IN} "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv(installation.PYTHON_VARIABLE, str(program))


@pytest.fixture
def config(tmp_path):
    model = write_tiny_model("qwen3", tmp_path / "model")
    files = write_arithmetic(tmp_path / "data", held_out=16)
    return compose(
        "quickstart",
        [
            f"output_dir={tmp_path / 'run'}",
            f"model.path={model}",
            f"data.train_files=[{files.train}]",
            f"data.eval_files=[{files.eval}]",
            "rollout.engine=sglang",
            "cluster.trainer_ranks=1",
            "megatron.expert_model_parallel_size=1",
            "loop.prompts_per_step=4",
            "loop.samples_per_prompt=2",
            f"reward.function={Path(__file__).parents[1] / 'digits.py'}:count_digits",
            "tracking.loggers=[]",
        ],
    )


def servers(program=str(STAND_IN)):
    return [process for process, command in descendants().items() if program in command.split()]


@pytest.mark.long
@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "adapter"])
def test_a_run_over_sglang_goes_on_after_its_server_was_killed(stand_in, config, adapter):
    if adapter:
        config.lora.rank, config.lora.merge = 4, False
        config.megatron["lr"] = 1e-2
    with ray_cluster(ClusterConfig()):
        with open_job(RunSetup.read(config, "train")) as job:
            killed, other = train_over_a_killed_server(job, direct=int(not adapter))
            job.export()
            check_greedy(job, adapter)
        # The processes of the cluster are still there, and would not end them.
        assert psutil.wait_procs([killed, other], timeout=120)[1] == []


@pytest.mark.sglang
def test_sglangs_own_server_that_was_killed_comes_back_with_the_weights(config):
    """The first refit brings the weights, to each: neither server reads any."""
    config.rollout.engine_args = {"context_length": 64, "max_total_tokens": 1024, "max_running_requests": 4}
    sampling = SamplingParameters(temperature=0, max_tokens=8)
    # Another test's server may live as long as the session.
    others = set(servers(OWN_SERVER))
    with ray_cluster(ClusterConfig()), open_job(RunSetup.read(config, "train")) as job:
        job.refit(0)
        ((before,),) = job.engines.generate([Request([5, 6, 7], sampling)])
        (killed,) = set(servers(OWN_SERVER)) - others
        killed.kill()
        ((after,),) = job.engines.generate([Request([5, 6, 7], sampling)])
        (restarted,) = set(servers(OWN_SERVER)) - others
        assert restarted != killed
        assert len(before.token_ids) > 0
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.log_probs.tolist() == before.log_probs.tolist()
        assert after.versions.tolist() == before.versions.tolist() == [0] * len(before.token_ids)


def train_over_a_killed_server(job, direct):
    job.refit(0)
    for _ in range(2):
        metrics = train_step(job, Clock())
        assert (metrics["refit/direct"], metrics["refit/repeated"]) == (direct, 0)
        assert metrics["refit/bytes"] > 0
    (killed,) = servers()
    killed.kill()
    # The new one gets the weights of this step, and samples it.
    metrics = train_step(job, Clock())
    assert (metrics["refit/direct"], metrics["engines/restarts"]) == (direct, 1)
    (other,) = servers()
    assert other != killed
    # Restarts are counted over the whole run.
    metrics = train_step(job, Clock())
    assert (metrics["refit/repeated"], metrics["engines/restarts"]) == (0, 1)
    assert servers() == [other]
    return killed, other


def check_greedy(job, adapter):
    """The server serves what was trained, by the last token alone: its model sees no others."""
    output = Path(job.config.output_dir)
    trained = load_file(output / EXPORT / "model.safetensors")
    if adapter:
        # Only the trained adapter, which moves embeddings there.
        a, b = (
            load_file(output / ADAPTER / "adapter_model.safetensors")[f"{SEEN}.lora_{each}.weight"] for each in "AB"
        )
        assert float(b.abs().max()) > 1e-3
        embeddings = trained["model.embed_tokens.weight"]
        scale = job.config.lora.alpha / job.config.lora.rank
        trained["model.embed_tokens.weight"] = embeddings + scale * (embeddings @ a.T @ b.T)[:, : embeddings.shape[1]]
    (turn,) = job.engines.generate([Request([5, 6, 7], SamplingParameters(temperature=0, max_tokens=8))])[0]
    token = 7
    for found, log_prob in zip(turn.token_ids.tolist(), turn.log_probs.tolist(), strict=True):
        logits = trained["model.embed_tokens.weight"][token] @ trained["lm_head.weight"].T
        token = int(logits.argmax())
        assert found == token
        assert log_prob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
    assert len(turn.token_ids) > 0
    assert set(turn.versions.tolist()) == {job.state.step}


@pytest.mark.long
def test_the_step_after_a_checkpoint_is_recorded_where_gpus_are_shared(stand_in, config):
    """The checkpoint is written in the trainers' turn, and workers of an engine are called in its own."""
    config.cluster.pools = {"all": PoolConfig(["trainer", "engine"], nodes=1, shared=True)}
    config.tracking.profile = 2
    with ray_cluster(ClusterConfig()), open_job(RunSetup.read(config, "train")) as job:
        job.refit(0)
        # On a CPU memory is no matter of the server's: until now it has released none.
        job.gpus.switch_to(job.engines)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ray.get(job.engines.handles[0].worker.actor.__ray_call__.remote(let_the_server_sleep))
        for step in (1, 2):
            with job.timeline.record(step):
                metrics = train_step(job, Clock())
            job.save()
        assert metrics["engines/restarts"] == 0
        (timeline,) = Path(config.output_dir, PROFILES).iterdir()
    events = json.loads(timeline.read_text())["traceEvents"]
    recorded = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert recorded == {"controller", "trainer_0", "engine_0", "engine_0 worker 0", "reward workers"}


def let_the_server_sleep(_actor):
    """As on GPUs."""
    engine.device = SimpleNamespace(backend=lambda: "nccl")
