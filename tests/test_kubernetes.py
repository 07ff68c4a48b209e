"""The manifest for KubeRay and the recipe in it fit each other."""

import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from megarl.config.compose import compose
from megarl.rollout import engine_kind

MANIFEST = Path(__file__).parents[1] / "docs/kubernetes/grpo_qwen3_moe.yaml"
RUN = "exec megarl train --config-name "


@pytest.fixture
def documents():
    return list(yaml.safe_load_all(MANIFEST.read_text()))


@pytest.fixture
def config(documents):
    """The configuration of the command in the Job."""
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    recipe, *overrides = shlex.split(script.replace("\\\n", " ").partition(RUN)[2])
    return compose(recipe, overrides)


def test_every_gpu_of_the_manifest_has_its_work(documents, config):
    (workers,) = documents[0]["spec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    sizes = engine_kind(config.rollout.engine).sizes(config.rollout.engine_args)
    assert config.cluster.trainer_ranks + config.rollout.replicas * sizes.tensor == gpus
    assert config.cluster.nodes == workers["replicas"]


def test_the_job_joins_the_cluster_of_the_manifest(documents):
    cluster, job = documents
    (container,) = job["spec"]["template"]["spec"]["containers"]
    secret = next(each for each in container["env"] if each["name"] == "RAY_AUTH_TOKEN")["valueFrom"]["secretKeyRef"]
    # Names that KubeRay gives.
    assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}
    assert container["args"][0].count(f"--address={cluster['metadata']['name']}-head-svc:6379") == 2
    assert cluster["spec"]["rayVersion"] == version("ray")


def test_only_failures_count_among_those_that_end_the_job(documents):
    refused, moved = documents[1]["spec"]["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]) == ("FailJob", {"operator": "In", "values": [2]})
    assert (moved["action"], moved["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget", "status": "True"}])
