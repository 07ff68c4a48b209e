"""A cluster of which nodes break while it is looked at: addresses of this host, on the one node of a local Ray."""

import os
import socket
import threading

import pytest
import ray

from megarl.cluster.ray.joining import machines
from megarl.doctor import cluster_check, probes
from megarl.doctor.cluster_check import check_cluster
from megarl.doctor.node_probe import NodeProbe
from megarl.doctor.probes import Probes

pytestmark = pytest.mark.usefixtures("shared_cluster")

ADDRESSES = tuple(f"127.0.0.{place}" for place in range(1, 5))
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.fixture
def nodes(monkeypatch):
    """Nodes n1 to n4. `broken` says what one does not do: "n3" in look."""

    class Breaking(NodeProbe):
        def name(self):
            return f"n{self._address[-1]}"

        def look(self, *, is_free, gpus):
            if self.name() == "n3":
                raise RuntimeError(f"{ECC}\nCompile with TORCH_USE_CUDA_DSA")
            return super().look(is_free=False, gpus=gpus)

        def listen(self):
            if self.name() == "n2":
                os._exit(1)
            return super().listen()

        def wait_for_ever(self):
            threading.Event().wait()

    monkeypatch.setattr(probes, "NodeProbe", Breaking)
    (node,) = machines(ray.nodes())
    return [node | {"NodeManagerAddress": address} for address in ADDRESSES]


def test_nodes_that_break_are_named_and_the_others_are_judged(nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_check, "machines", lambda _: nodes)
    report = check_cluster([str(tmp_path)], [str(tmp_path / "model")])
    assert [node.name for node in report.nodes] == ["n1", "n4"]
    assert all(node.limits.open_files is not None for node in report.nodes)
    assert all(node.shared_memory_bytes > 0 for node in report.nodes)
    assert {(link.sender, link.receiver) for link in report.links} == {("n1", "n4"), ("n4", "n1")}
    assert [(fault.node, fault.what) for fault in report.faults[:2]] == [
        ("n3", f"it did not measure itself ({ECC})"),
        ("n2", "it did not listen at its address: its process died, or its Ray node"),
    ]
    unseen = {fault.node for fault in report.faults[2:] if fault.what == f"it does not see {tmp_path / 'model'}"}
    assert unseen == {"n1", "n4"}
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_silent_is_asked_no_more(nodes):
    with Probes(nodes, ()) as asked:
        asking = {ADDRESSES[0]: asked.actors[ADDRESSES[0]].wait_for_ever.remote()}
        assert asked.answers(asking, "look", 0.5) == {}
        assert [(fault.node, fault.what) for fault in asked.faults] == [("n1", "it did not look in 0.5 s")]
        assert tuple(asked.actors) == ADDRESSES[1:]


def test_nodes_of_one_name_are_told_apart(nodes, monkeypatch):
    monkeypatch.setattr(probes, "NodeProbe", NodeProbe)
    with Probes(nodes[:2], ()) as asked:
        host = socket.gethostname()
        assert asked.names == {address: f"{host} ({address})" for address in ADDRESSES[:2]}


def test_with_no_node_left_there_is_a_verdict(nodes, monkeypatch):
    monkeypatch.setattr(cluster_check, "machines", lambda _: [nodes[2]])
    report = check_cluster([])
    assert (report.nodes, report.links) == ([], [])
    assert [fault.node for fault in report.faults] == ["n3"]
