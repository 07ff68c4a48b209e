"""The manifest for KubeRay and the recipe in it fit each other, and its shell ends when it is told to."""

import shlex
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import psutil
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
def script(documents):
    """The shell lines of the Job."""
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    return script


@pytest.fixture
def config(script):
    """The configuration of the command in the Job."""
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


def test_a_machine_that_is_busy_for_minutes_is_not_ended(documents):
    """As with KubeRay's own probes; by default, three of a second in a row end a container."""
    spec = documents[0]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        probe = container["livenessProbe"]
        assert probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) >= 600
        assert probe.get("timeoutSeconds", 1) >= 5


def test_only_failures_count_among_those_that_end_the_job(documents):
    refused, moved = documents[1]["spec"]["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]) == ("FailJob", {"operator": "In", "values": [2]})
    assert (moved["action"], moved["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget", "status": "True"}])


# As the first process of a container, which no signal ends that it does not ask for.
FIRST = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "bash", "-c"]


@pytest.mark.parametrize("answer", ["exit 1", "exec sleep 600"])
def test_a_controller_that_waits_for_the_cluster_ends_when_it_is_told_to(answer, script, tmp_path, monkeypatch):
    if subprocess.run([*FIRST, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces here")
    ray = tmp_path / "ray"
    ray.write_text(f"#!/bin/sh\ntouch {tmp_path / 'asked'}\n{answer}\n")
    ray.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with subprocess.Popen([*FIRST, script]) as container:
        try:
            while not (tmp_path / "asked").exists():
                assert container.poll() is None
                time.sleep(0.05)
            time.sleep(0.5)
            (first,) = psutil.Process(container.pid).children()
            first.terminate()
            assert container.wait(60) == 143
        finally:
            container.kill()


def test_a_controller_begins_when_the_cluster_answers(script, tmp_path, monkeypatch):
    ray = tmp_path / "ray"
    ray.write_text(f"#!/bin/sh\necho $1 >> {tmp_path / 'asked'}\n")
    (tmp_path / "megarl").write_text(f"#!/bin/sh\necho megarl $1 >> {tmp_path / 'asked'}\nexit 3\n")
    for program in (ray, tmp_path / "megarl"):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert subprocess.run(["bash", "-c", script]).returncode == 3
    assert (tmp_path / "asked").read_text().splitlines() == ["health-check", "start", "megarl train"]
