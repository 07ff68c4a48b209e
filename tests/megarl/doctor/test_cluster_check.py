"""`megarl doctor --cluster` on Ray nodes of this host, one of which has another version and is slow on purpose."""

import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from megarl.cli.main import main
from megarl.cluster.ray import runtime
from megarl.doctor import cluster_check, probes
from megarl.doctor.cluster_check import ClusterReport, require_sound_nodes
from megarl.doctor.cluster_faults import Fault
from megarl.process.errors import MachinesUnfit
from megarl.schema import ClusterConfig

pytestmark = pytest.mark.long

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
OTHER = HOSTS[1]
OBJECT_STORE_BYTES = 100 * 1024**2


@contextmanager
def empty_cluster() -> Iterator[Cluster]:
    """A cluster on loopback, for nodes to join."""
    runtime._require_token()
    runtime._bind_to_loopback()
    with pytest.MonkeyPatch.context() as patch:
        # Short, because the path of a Unix socket ends after 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-"))
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        try:
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder)


def add_node(cluster, host, environment=(), **resources):
    cluster.add_node(
        num_cpus=1,
        node_ip_address=host,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        env_vars={**dict(environment), "SLURMD_NODENAME": f"node-{host[-1]}"},
        **resources,
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Address of a cluster whose second node is another than the rest."""
    older = tmp_path_factory.mktemp("older")
    about = older / "safetensors-0.5.0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.5.0\n")
    with empty_cluster() as cluster:
        for host in HOSTS:
            add_node(cluster, host, {"PYTHONPATH": str(older)} if host == OTHER else {})
        yield cluster.address


def report_of(address, folder, capsys):
    assert main(["doctor", "--cluster", address, "--json", "--folders", str(folder)]) == 1
    return json.loads(capsys.readouterr().out)


@contextmanager
def slowed_down(name: str) -> Iterator[None]:
    """Let the process that looks at a node run for a tenth of the time alone, whatever else the host does."""
    done = threading.Event()

    def is_meant(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.name().startswith("ray::") and process.environ().get("SLURMD_NODENAME") == name
        return False

    def slow_down() -> None:
        while not done.wait(0.01):
            stopped = [process for process in psutil.process_iter() if is_meant(process)]
            for wait_s, act in ((0.09, psutil.Process.suspend), (0, psutil.Process.resume)):
                for process in stopped:
                    with suppress(psutil.NoSuchProcess):
                        act(process)
                done.wait(wait_s)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def of_other(report):
    """All that the second node is named for."""
    return {fault["what"] for fault in report["faults"] if fault["node"] == "node-2"}


def test_the_other_node_is_named_for_what_is_other(address, tmp_path, capsys):
    report = report_of(address, tmp_path, capsys)
    assert [node["name"] for node in report["nodes"]] == ["node-1", "node-2", "node-3"]
    assert all(compute["is_right"] for node in report["nodes"] for compute in node["compute"])
    assert len(report["links"]) == 6
    assert all(link["gbyte_per_s"] > 0 and not link["failure"] for link in report["links"])
    assert any(what.startswith("safetensors 0.5.0 is installed, and ") for what in of_other(report))
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_multiplies_slowly_is_named(address, tmp_path, capsys):
    with slowed_down("node-2"):
        report = report_of(address, tmp_path, capsys)
    assert any(what.startswith("cpu multiplies at ") for what in of_other(report))


def test_a_run_does_not_start_on_it_unless_told(address, tmp_path):
    config = ClusterConfig(address=address)
    with pytest.raises(MachinesUnfit, match=r"^node-2: safetensors 0\.5\.0 .*; .* \(cluster\.check_nodes=false\)"):
        require_sound_nodes(config, [tmp_path])
    model = tmp_path / "model"
    with pytest.raises(MachinesUnfit, match=rf"^node-1: it does not see {model}; .*give its absolute path"):
        require_sound_nodes(config, [tmp_path], [tmp_path, model])
    config.check_nodes = False
    require_sound_nodes(config, [tmp_path])


def test_a_run_on_a_sound_one_gives_back_what_a_failed_try_had(address, tmp_path, monkeypatch, capsys):
    slow_way = Fault("n1", "1 GB/s go to n2", "see to the cables", refuses=False)
    monkeypatch.setattr(cluster_check, "check_cluster", lambda *_: ClusterReport([], [], [slow_way]))
    require_sound_nodes(ClusterConfig(address=address), [tmp_path])
    assert "warning: n1: 1 GB/s go to n2; see to the cables\n" in capsys.readouterr().err
    # Ray does that as a try leaves the cluster, which it does not inside of another connection.
    assert not ray.is_initialized()


def test_a_folder_that_is_not_there_is_named(address, tmp_path, capsys):
    assert main(["doctor", "--cluster", address, "--folders", str(tmp_path / "absent")]) == 2
    assert "cannot write into" in capsys.readouterr().err


def test_what_runs_only_read_is_looked_for_and_not_written_into(address, tmp_path, capsys):
    absent = str(tmp_path / "absent")
    words = ["--folders", str(tmp_path), "--inputs", "/proc", absent]
    assert main(["doctor", "--cluster", address, "--json", *words]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [node["unseen_inputs"] for node in report["nodes"]] == [[absent]] * 3
    assert main(["doctor", "--cluster", address, "--folders", "/proc"]) == 2


def test_a_folder_that_lets_a_node_wait_is_named(address, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probes, "ANSWER_S", 2.0)
    monkeypatch.setattr(secrets, "token_hex", lambda _count: "fixed")
    # To write there takes somebody who reads, as a file system takes a server that answers.
    os.mkfifo(tmp_path / ".megarl-fixed")
    assert main(["doctor", "--cluster", address, "--folders", str(tmp_path)]) == 1
    assert f"node-1: it did not write into {tmp_path} in 2 s" in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use the GPUs of this machine")
def test_gpus_that_torch_cannot_use_are_no_sound_cpu(tmp_path, capsys):
    """As with a driver that is too old for torch on every node, where no node differs from the rest."""
    with empty_cluster() as cluster:
        for host in HOSTS[:2]:
            add_node(cluster, host, num_gpus=8)
        report = report_of(cluster.address, tmp_path, capsys)
    said = {(fault["node"], fault["what"].partition(" (")[0], fault["refuses"]) for fault in report["faults"]}
    assert {(f"node-{place}", "cuda computes nothing", True) for place in (1, 2)} <= said
