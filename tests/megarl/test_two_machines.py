"""Jobs whose trainer and engines are on machines of their own: two nodes of a Ray cluster, here on one host."""

import os
import shutil
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch
from eventually import descendants, eventually
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from test_main_job import greedy_tokens, make_config
from transformers import AutoModelForCausalLM

from converters.errors import UserError
from converters.hf_to_megatron import HUGGINGFACE, convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.restarts import Restarts, StartStages
from megarl.cluster.placement.placement import Role
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.ray import runtime
from megarl.cluster.workers.calls import ended_calls
from megarl.cluster.workers.long_arrays import taken_out
from megarl.cluster.workers.streams import Stream, results_of
from megarl.cluster.workers.worker import WorkerGone
from megarl.cluster.workers.worker_group import WorkerGroup
from megarl.models.policy import check_loadable
from megarl.output.places import EXPORT
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.refit.choice import check_machines
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.run.job import open_job
from megarl.run.opening import RunSetup
from megarl.schema import PoolConfig, RefitConfig
from megarl.tracking.clock import Clock
from megarl.train import train_step

OBJECT_STORE_BYTES = 100 * 1024**2
HOSTS = {"127.0.0.1": 3, "127.0.0.2": 2}
"""Address and cores of each machine."""
LENGTH = 12
NOTICED_S = 200


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes. All started for it, and written, is gone afterwards."""
    before = set(psutil.Process().children(recursive=True))
    runtime._require_token()
    runtime._bind_to_loopback()
    with pytest.MonkeyPatch.context() as patch:
        # Short, because the path of a Unix socket ends after 107 bytes.
        folder = tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        try:
            for host, cores in HOSTS.items():
                cluster.add_node(
                    num_cpus=cores,
                    node_ip_address=host,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                )
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder)
    left = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(left, timeout=120)[1] == []


@pytest.fixture
def address(cluster):
    return cluster.address


@pytest.fixture
def config(address, tmp_path):
    made = make_config("qwen3", tmp_path)
    made.cluster.address, made.cluster.trainer_ranks = address, 1
    # The first node has room for both.
    made.cluster.pools = {"training": PoolConfig(["trainer"], nodes=1)}
    made.megatron["tensor_model_parallel_size"] = 1
    return made


@pytest.mark.long
def test_a_job_on_two_machines_is_killed_and_goes_on(config, tmp_path, capsys):
    arguments = config.rollout.engine_args
    config.rollout.engine, config.rollout.engine_args = "transformers", {}
    config.refit.delta = True
    with pytest.raises(KeyboardInterrupt):
        begin_and_be_killed(config)
    assert "\n127.0.0.1   trainer 0\n127.0.0.2   engine 0\n" in capsys.readouterr().err
    # It goes on with another engine, which lies on both machines, beside the rank on one of them.
    config.rollout.engine = "vllm"
    config.rollout.engine_args = {**arguments, "nnodes": 2, "tensor_parallel_size": 2}
    config.cluster.pools, config.refit.transport = {}, "rdma"
    with open_job(RunSetup.read(config, "train")) as job:
        assert job.state.step == 1
        check_that_the_workers_of_the_engine_are_apart(job)
        assert "\n127.0.0.1   trainer 0, engine 0\n127.0.0.2   engine 1\n" in capsys.readouterr().err
        metrics = job.refit(1)
        assert job.refit.description.startswith(
            "direct, through shared_memory on one machine and, between two, rdma, but by way of sockets: "
        )
        assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 0)
        assert metrics["refit/bytes"] > 0
        check_step(train_step(job, Clock()))
        job.export()
        prompts = job.data.eval_prompts[:4]
        greedy = SamplingParameters(temperature=0.0, max_tokens=LENGTH)
        answers = job.engines.generate([Request(list(prompt.token_ids), greedy) for prompt in prompts])
        check_listener(job)
        check_that_a_worker_that_dies_on_the_second_machine_is_noticed(job, Request(list(prompts[0].token_ids), greedy))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / EXPORT, dtype=torch.float32)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert answer.token_ids.tolist() == greedy_tokens(reference, prompt.token_ids)
        assert set(answer.versions) == {2}


def begin_and_be_killed(config):
    with open_job(RunSetup.read(config, "train")) as job:
        assert len({*job.trainer.nodes(), *job.engines.nodes()}) == 2
        metrics = job.refit(0)
        assert (metrics["refit/direct"], metrics["refit/bytes"]) == (1, 0)
        assert job.refit.description.startswith(
            "direct, through tcp, as no active port of InfiniBand, RoCE or EFA is seen by trainer rank 0, engine worker"
            " 0 (ibstat, /dev/infiniband). If "
        )
        check_step(train_step(job, Clock()))
        job.save()
        raise KeyboardInterrupt


def check_that_the_workers_of_the_engine_are_apart(job):
    (rank_node,) = job.trainer.nodes()
    first, second = job.engines.worker_nodes()
    assert first != second
    assert rank_node in (first, second)
    (engine,) = job.engines.handles
    assert engine.worker_nodes == [first, second]


def check_listener(job):
    """Receivers find the rank at the address that its machine has for others."""
    (rank_node,) = job.trainer.nodes()
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    ((host, _),) = job.trainer.weights.open_transfer(job.refit._path._spec)
    assert {*hosts.values()} == {*HOSTS}
    assert host == hosts[rank_node]


def check_that_a_worker_that_dies_on_the_second_machine_is_noticed(job, request):
    """Also where nothing is asked of it, and nobody hears from the network that it is gone."""
    (worker,) = [process for process, command in descendants().items() if "VLLM::Worker_TP1" in command]
    ((before,),) = job.engines.generate([request])
    part = worker.parent()
    worker.kill()
    part.wait(NOTICED_S)
    ((after,),) = job.engines.generate([request])
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.versions.tolist() == before.versions.tolist()


def check_step(metrics):
    # Responses were sampled with the trainer's weights, of the step before.
    assert metrics["log_prob_difference/max"] < 1e-4
    assert metrics["policy/gradient_norm"] > 0
    assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 0)
    assert metrics["refit/bytes"] > 0
    # Since the last refit; at first, since the weights that engine and ranks had read alike.
    assert 0 < metrics["refit/changed"] <= 1


@pytest.mark.long
def test_engines_that_cannot_begin_with_the_weights_of_the_ranks_are_refused(config, tmp_path):
    source, converted = write_tiny_model("qwen3", tmp_path / "other", seed=1), tmp_path / "converted"
    convert_checkpoint(
        source,
        converted,
        ParallelSizes(world_size=1),
        dtype="keep",
        vocabulary_multiple=128,
        workers=1,
        progress=lambda done, total: None,
    )
    config.model.megatron_checkpoint = str(converted)
    with pytest.raises(
        UserError, match=r"^the engine does not keep .* only way between machines: .*megatron_checkpoint"
    ):
        start(config)
    # Said without another start of everything, which takes a quarter of a minute.
    config.model.path = str(converted / HUGGINGFACE)
    with pytest.raises(UserError, match=r"run on 2 machines, .* it has none: .*; export model\.megatron_checkpoint"):
        check_loadable(RunSetup.read(config, "train").model, machines=2)


@pytest.mark.long
def test_what_the_machines_do_not_hold_is_refused_before_anything_starts(config, tmp_path):
    config.cluster.pools["rollout"] = PoolConfig(["engine"], nodes=2)
    with pytest.raises(UserError, match=r"^cluster\.pools\.rollout asks for 2 machines, and 1 that no other pool has"):
        start(config)
    config.cluster.pools = {}
    config.rollout.engine_args |= {"nnodes": 4, "tensor_parallel_size": 4}
    with pytest.raises(UserError, match=r"^an engine over 4 machines needs 1 CPU on each; of 1 machine of 2 CPUs, 1 "):
        start(config)
    assert not list((tmp_path / "run").glob("logs/*"))


def start(config):
    with open_job(RunSetup.read(config, "train")):
        pass


def test_what_ends_at_one_machine_is_refused_between_several():
    planned = RefitConfig()
    check_machines(3, planned, has_gpus=False)
    check_machines(1, replace(planned, path="loader", transport="cuda_ipc"), has_gpus=True)
    with pytest.raises(UserError, match=r"^refit\.path=loader goes .* run on 3 machines: set it to auto$"):
        check_machines(3, replace(planned, path="loader"), has_gpus=False)
    with pytest.raises(
        UserError, match=r"^refit\.transport=cuda_ipc is .* run on 3 machines: set it to auto, rdma or tcp$"
    ):
        check_machines(3, replace(planned, transport="cuda_ipc"), has_gpus=True)


def test_memory_of_gpus_is_refused_where_there_are_none():
    with pytest.raises(UserError, match=r"^refit\.transport=cuda_ipc is memory of GPUs, .* none: set it to auto$"):
        check_machines(1, replace(RefitConfig(), transport="cuda_ipc"), has_gpus=False)


@pytest.mark.long
def test_long_arrays_that_a_stream_is_waited_for_stay_on_their_machine(config, tmp_path):
    class Telling:
        def stream(self):
            rest, arrays = taken_out(np.arange(2**20))
            yield rest, len(arrays)
            for array in (*arrays, None):
                time.sleep(0.5)
                yield array

    with runtime.ray_cluster(config.cluster):
        here = ray.get_runtime_context().get_node_id()
        (there,) = {node["NodeID"] for node in ray.nodes()} - {here}
        placed = NodeAffinitySchedulingStrategy(there, soft=False)
        actor = ray.remote(num_cpus=0)(Telling).options(scheduling_strategy=placed).remote()
        worker = SimpleNamespace(log=tmp_path / "telling.log", failure=None)
        ((_, told),) = results_of([Stream(worker, actor.stream.remote())])
        assert ray.experimental.get_object_locations([told.reference])[told.reference]["node_ids"] == [there]


@pytest.mark.long
def test_an_engine_whose_machine_is_gone_is_not_started_there_again(cluster, config, tmp_path):
    lost = cluster.add_node(num_cpus=4, object_store_memory=OBJECT_STORE_BYTES)
    # No other machine has as much.
    role = Role("engine", processes=1, cpus=4, gpus=0)
    with runtime.ray_cluster(config.cluster), reserve([role], config.cluster) as seats:
        group = WorkerGroup(seats["engine"], tmp_path)
        group.nodes()
        (worker,) = group.workers
        assert not worker.has_lost_its_machine
        cluster.remove_node(lost, allow_graceful=False)
        # The process may outlive what started it for a moment.
        assert eventually(lambda: ended_calls([worker.begin_node()]) and worker.failure, NOTICED_S)
        assert eventually(lambda: worker.has_lost_its_machine, NOTICED_S)
        assert group.renew(worker).has_lost_its_machine
        restarts = Restarts(3, StartStages(iter, iter), up_within_s=60, start_within_s=60)
        with pytest.raises(WorkerGone, match="engine_0 is gone with the Ray node that it was on") as caught:
            restarts.begin(EngineHandle([worker]))
        assert caught.value.may_resume
