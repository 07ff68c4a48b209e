"""Roles: what the processes of a run ask of the cluster, and what they find in their environment."""

import os
from contextlib import nullcontext

import pytest
import ray
import torch

from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.cluster.placement.roles import engine_role, engine_threads, trainer_role
from megarl.run import opening
from megarl.schema import ClusterConfig, MegarlConfig, RolloutConfig
from megatron_ext.options.options import MegatronOptions

pytestmark = pytest.mark.usefixtures("folder_of_ray")


@pytest.fixture(params=[0, 8], ids=["no GPUs", "8 GPUs"])
def gpus(request, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": float(request.param)})
    return request.param


def ranks(cluster=None):
    return trainer_role("trainer", ParallelSizes(8, tensor_model_parallel_size=4), cluster or ClusterConfig())


def test_gpus_are_asked_for_where_there_are_any(gpus):
    rollout = RolloutConfig(engine_args={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    asked = ranks().gpus, engine_role(ClusterConfig(), rollout).gpus
    assert asked == ((1, 4) if gpus else (0, 0))


def test_a_rank_and_an_engine_can_share_a_gpu(gpus):
    cluster = ClusterConfig(gpu_share=0.4)
    expected = (0.4, 0.4) if gpus else (0, 0)
    assert (ranks(cluster).gpus, engine_role(cluster, RolloutConfig()).gpus) == expected


@pytest.mark.parametrize(("ranks", "workers"), [(2, 1), (1, 2)])
def test_what_needs_several_gpus_shares_none(monkeypatch, ranks, workers):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    with pytest.raises(UserError, match=r"cluster\.gpu_share=0\.5 is for one Megatron rank"):
        engine_role(
            ClusterConfig(gpu_share=0.5, trainer_ranks=ranks),
            RolloutConfig(engine_args={"tensor_parallel_size": workers}),
        )


def test_an_engine_over_machines_asks_on_each_for_what_its_workers_there_need(gpus):
    rollout = RolloutConfig(engine_args={"tensor_parallel_size": 8, "nnodes": 2})
    role = engine_role(ClusterConfig(address="auto"), rollout)
    assert role.gpus == (4 if gpus else 0)
    assert (role.processes, role.group, role.apart) == (2, 2, True)


def test_a_tensor_parallel_group_belongs_together(gpus):
    assert (ranks().processes, ranks().group, ranks().apart) == (8, 4, False)
    own = ranks(ClusterConfig(address="auto", trainer_cpus=3))
    # On this machine alone nobody else's work is kept apart: thousands of processes have room beside each other.
    assert (own.cpus, ranks().cpus) == (3, pytest.approx(0.0001))


@pytest.mark.parametrize(
    ("address", "nodes", "says"),
    [
        (None, 2, r"an engine over 2 machines, and the run has this one alone: set cluster\.address"),
        ("auto", 3, "an engine of 8 workers over 3 machines, each of which takes as many"),
    ],
)
def test_an_engine_over_machines_that_are_not_there_is_refused(gpus, address, nodes, says):
    rollout = RolloutConfig(engine_args={"tensor_parallel_size": 8, "nnodes": nodes})
    with pytest.raises(UserError, match=says):
        engine_role(ClusterConfig(address=address), rollout)


def test_no_process_imports_from_the_current_folder(gpus):
    for cluster in (ClusterConfig(), ClusterConfig(address="auto")):
        roles = ranks(cluster), engine_role(cluster, RolloutConfig())
        assert {role.environment["PYTHONSAFEPATH"] for role in roles} == {"1"}


def test_only_megatrons_ranks_have_one_hardware_queue_and_not_with_fsdp2(gpus):
    fully_sharded = trainer_role("trainer", ParallelSizes(8, use_torch_fsdp2=True), ClusterConfig())
    places = ranks(), fully_sharded, engine_role(ClusterConfig(), RolloutConfig())
    assert [resources.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") for resources in places] == ["1", None, None]


def test_libraries_of_deterministic_ranks_are_told_as_they_start(gpus):
    asked = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    of_tree = ClusterConfig(environment={"NCCL_ALGO": "Tree"})
    for cluster, expected in ((ClusterConfig(), asked), (of_tree, {**asked, "NCCL_ALGO": "Tree"})):
        role = trainer_role("trainer", ParallelSizes(8), cluster, is_deterministic=True)
        assert {name: role.environment[name] for name in asked} == expected
    assert not asked.keys() & ranks().environment.keys()


@pytest.mark.parametrize(("address", "threads"), [(None, 6), ("auto", 16)])
def test_an_optimizer_on_the_host_has_the_cores_that_there_are_for_a_gpu(gpus, monkeypatch, address, threads):
    nodes = [(True, {"CPU": 8.0}), (True, {"CPU": 192.0, "GPU": 8.0}), (True, {"CPU": 131.0, "GPU": 8.0})]
    nodes.append((False, {"CPU": 1.0, "GPU": 8.0}))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": alive, "Resources": each} for alive, each in nodes])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(52)))

    def threads_of(*, on_host, **environment):
        cluster = ClusterConfig(address=address, environment=environment)
        role = trainer_role("trainer", ParallelSizes(), cluster, steps_on_host=on_host)
        return int(role.environment["OMP_NUM_THREADS"])

    assert threads_of(on_host=True) == (threads if gpus else 1)
    assert threads_of(on_host=False) == 1
    assert threads_of(on_host=True, OMP_NUM_THREADS="3") == 3


def test_a_run_asks_for_what_the_options_of_a_model_need(monkeypatch):
    class ReservedError(Exception):
        pass

    def reserve(roles, _cluster):
        names = "NCCL_ALGO", "OMP_NUM_THREADS"
        raise ReservedError({role.name: [role.environment.get(name) for name in names] for role in roles})

    monkeypatch.setattr(opening, "ray_cluster", lambda _cluster: nullcontext())
    monkeypatch.setattr(opening, "reserve", reserve)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 1.0, "GPU": 1.0}}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2, 3})
    models = {
        name: MegatronOptions(
            ParallelSizes(),
            torch.bfloat16,
            transformer={"deterministic_mode": name == "trainer"},
            optimizer={"optimizer_cpu_offload": name == "critic"},
        )
        for name in ("trainer", "critic")
    }
    config = MegarlConfig()
    with pytest.raises(ReservedError) as reserved, opening.open_processes(config, models, engines=False):
        pass
    assert reserved.value.args == ({"trainer": ["Ring", "1"], "critic": [None, "4"]},)


def test_an_engine_computes_with_the_cores_that_idle_during_a_rollout(gpus, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    places = ranks(), engine_role(ClusterConfig(), RolloutConfig())
    assert [resources.environment["OMP_NUM_THREADS"] for resources in places] == ["1", "1" if gpus else str(cores)]
    assert places[1].environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("cluster", "replicas", "tensor_parallel_size", "threads"),
    [
        ({}, 1, 1, 8),
        ({}, 2, 2, 2),
        ({}, 3, 4, 1),
        ({"engine_threads": 3}, 2, 2, 3),
        # The load of a cluster's other cores is not known here.
        ({"address": "auto"}, 2, 1, 1),
        ({"address": "auto", "engine_cpus": 6}, 2, 2, 3),
    ],
)
def test_workers_share_the_cores(cluster, replicas, tensor_parallel_size, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rollout = RolloutConfig(replicas=replicas, engine_args={"tensor_parallel_size": tensor_parallel_size})
    assert engine_threads(ClusterConfig(**cluster), rollout, cores=8) == threads


def test_the_environment_may_say_how_many_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert engine_threads(ClusterConfig(), RolloutConfig(), cores=8) == 5
    assert engine_threads(ClusterConfig(engine_threads=3), RolloutConfig(), cores=8) == 3


def test_the_environment_of_the_configuration_wins(gpus):
    cluster = ClusterConfig(environment={"OMP_NUM_THREADS": "9", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_DEBUG": ""})
    for role in ranks(cluster), engine_role(cluster, RolloutConfig()):
        assert {name: role.environment[name] for name in cluster.environment} == cluster.environment
