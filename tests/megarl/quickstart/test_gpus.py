"""The quickstart's jobs for machines with GPUs: legal ones, that fit."""

import pytest
import ray

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.cluster.placement.roles import engine_role, trainer_role
from megarl.config.compose import compose
from megarl.quickstart.gpus import overrides_for
from megarl.quickstart.models import MODELS
from megarl.rollout import ENGINES


@pytest.mark.usefixtures("folder_of_ray")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_and_engine_fit(model, gpus, engine, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    chosen = MODELS[model]
    paths = [f"rollout.engine={engine}", "model.path=m", "data.train_files=[a]"]
    job = compose(chosen.recipe, [*chosen.overrides, *overrides_for(gpus, engine), *paths])
    asked = job.cluster.trainer_ranks * trainer_role("trainer", ParallelSizes(), job.cluster).gpus
    asked += job.rollout.replicas * engine_role(job.cluster, job.rollout).gpus
    assert asked <= gpus
    assert not gpus or job.model.dtype == job.rollout.engine_args["dtype"].replace("bfloat16", "bf16") == "bf16"
    assert job.cluster.trainer_ranks % job.megatron.get("expert_model_parallel_size", 1) == 0
