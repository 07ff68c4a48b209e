"""What workers ask of the cluster, and what they find in their environment."""

import pytest
import ray

from megarl.cluster.placement import engine_place, trainer_place
from megarl.config.schema import ClusterConfig


@pytest.fixture(params=[0, 8], ids=["no GPUs", "8 GPUs"])
def gpus(request, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": float(request.param)})
    return request.param


def test_gpus_are_asked_for_where_there_are_any(gpus):
    arguments = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    asked = trainer_place(ClusterConfig()).gpus, engine_place(ClusterConfig(), arguments).gpus
    assert asked == ((1, 4) if gpus else (0, 0))


def test_only_megatrons_ranks_have_one_hardware_queue(gpus):
    places = trainer_place(ClusterConfig()), engine_place(ClusterConfig(), {})
    assert [place.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") for place in places] == ["1", None]
    assert all(place.environment["OMP_NUM_THREADS"] == "1" for place in places)
