"""Checks all nodes of a Ray cluster at once, and the network between them."""

import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from megarl.cluster.ray.joining import machines
from megarl.cluster.ray.runtime import ray_cluster
from megarl.doctor.cluster_faults import Fault, find_faults
from megarl.doctor.node_probe import Link, Node
from megarl.doctor.probes import Probes
from megarl.doctor.slow_links import measured_again
from megarl.process.errors import MachinesUnfit, RunFailed
from megarl.process.phase import phase
from megarl.schema import ClusterConfig


@dataclass(frozen=True)
class ClusterReport:
    """Nodes, the links between them, and the faults found."""

    nodes: list[Node]
    links: list[Link]
    faults: list[Fault]

    @property
    def refusals(self) -> list[Fault]:
        """The faults with which no run may start."""
        return [fault for fault in self.faults if fault.refuses]

    @property
    def warnings(self) -> list[Fault]:
        """The faults with which a run may start."""
        return [fault for fault in self.faults if not fault.refuses]


class NodeSilent(RunFailed):
    """A node did not answer, and the check cannot go on without its answer."""

    details = ""

    def __init__(self, fault: Fault) -> None:
        self.sentence = f"{fault.node}: {fault.what}; {fault.remedy}"
        super().__init__(self.sentence)


def check_cluster(folders: Sequence[str], inputs: Sequence[str] = ()) -> ClusterReport:
    """Measure the cluster that this process is connected to; a node lost during the check is a fault like any other.

    All nodes must see files written to the `folders`, and the `inputs`, which may be read-only. Raises MachinesUnfit if
    the node that writes the files cannot, and NodeSilent if it does not answer.
    """
    alive = machines(ray.nodes())
    free = [node["NodeManagerAddress"] for node in alive if _is_free(node)]
    with Probes(alive, free) as probes:
        unseen = _unseen_folders(probes, folders)
        looking = {address: each.unseen.remote(list(inputs)) for address, each in probes.actors.items()}
        absent = probes.answers(looking, "look for the inputs")
        gpus = {node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) for node in alive}
        measuring = {
            address: each.look.remote(is_free=address in free, gpus=gpus[address])
            for address, each in probes.actors.items()
        }
        seen: dict[str, Node] = probes.answers(measuring, "measure itself")
        offsets = _offsets(probes)
        links = _measure_links(probes)
        nodes = [
            replace(
                seen[address],
                name=probes.names[address],
                clock_offset_s=offsets[address],
                unseen_folders=unseen[address],
                unseen_inputs=absent[address],
            )
            for address in probes.actors
        ]
        names = {node.name for node in nodes}
        links = [link for link in links if {link.sender, link.receiver} <= names]
        return ClusterReport(nodes, links, [*probes.faults, *find_faults(nodes, links)])


def require_sound_nodes(config: ClusterConfig, folders: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """Raise MachinesUnfit if nodes of the configured cluster are unfit, or do not see the `folders` or `inputs`.

    Without a cluster, without `check_nodes`, or on a single machine nothing is checked. It disconnects from Ray at the
    end: Ray frees what an attempt of a run holds when that disconnects, but not within another connection.
    """
    if config.address is None or not config.check_nodes:
        return
    with ray_cluster(config):
        if len(machines(ray.nodes())) < 2:
            return
        with phase("looking at the nodes"):
            report = check_cluster(list(map(str, folders)), list(map(str, inputs)))
    for warning in report.warnings:
        print(f"warning: {warning.node}: {warning.what}; {warning.remedy}", file=sys.stderr, flush=True)
    if faults := report.refusals:
        raise MachinesUnfit(
            f"{faults[0].node}: {faults[0].what}; {faults[0].remedy}, or start with it all the same"
            " (cluster.check_nodes=false)",
            "\n".join(f"{fault.node}: {fault.what}; {fault.remedy}" for fault in faults[1:]),
        )


def _is_free(node: Mapping[str, Any]) -> bool:
    """Whether all CPUs and GPUs of the node are unused."""
    free = available_resources_per_node().get(node["NodeID"], {})
    return all(free.get(kind, 0) == node["Resources"].get(kind, 0) for kind in ("CPU", "GPU"))


def _offsets(probes: Probes) -> dict[str, float]:
    """Address -> seconds by which the clock there is ahead of this one."""
    offsets = {}
    for address, probe in list(probes.actors.items()):
        before = time.time()
        for there in probes.answers({address: probe.clock.remote()}, "tell its time").values():
            offsets[address] = there - (before + time.time()) / 2
    return offsets


def _unseen_folders(probes: Probes, folders: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Address -> the folders in which a node does not find the file written by the first node."""
    name = f".megarl-{secrets.token_hex(8)}"
    unseen: dict[str, tuple[str, ...]] = dict.fromkeys(probes.actors, ())
    for folder in folders:
        first = next(iter(probes.actors), None)
        if first is None:
            break
        writer = probes.actors[first]
        written = probes.answers({first: writer.write.remote(folder, name)}, f"write into {folder}")
        # The file system may hang, on the other nodes, too.
        if not written:
            raise NodeSilent(probes.faults[-1])
        if written[first]:
            raise MachinesUnfit(
                f"{first} cannot write into {folder} ({written[first]}): make it, or name another folder"
            )
        try:
            asked = {address: each.sees.remote(folder, name) for address, each in probes.actors.items()}
            found = probes.answers(asked, f"look into {folder}")
        finally:
            probes.answers({first: writer.remove.remote(folder, name)}, f"remove what it wrote into {folder}")
        unseen |= {address: (*unseen[address], folder) for address, there in found.items() if not there}
    return unseen


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield all pairs of `count` nodes, in rounds of disjoint pairs, so that measurements do not disturb each other.

    Example: three nodes meet in [(1, 2)], [(0, 2)] and [(0, 1)].
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(one, other) for one, other in met if one is not None and other is not None]
        places = [places[0], places[-1], *places[1:-1]]


def _measure_links(probes: Probes) -> list[Link]:
    addresses, links = list(probes.actors), list[Link]()
    for places in rounds(len(addresses)):
        pairs = [(addresses[one], addresses[other]) for one, other in places]
        for way in (pairs, [(other, one) for one, other in pairs]):
            links += _measure(probes, way)
    at = {name: address for address, name in probes.names.items()}
    return measured_again(links, lambda ways: _measure(probes, [(at[one], at[other]) for one, other in ways]))


def _measure(probes: Probes, ways: Sequence[tuple[str, str]]) -> list[Link]:
    """Measure links between pairs of addresses concurrently; those of nodes that do not answer are left out."""
    ways = [way for way in ways if probes.actors.keys() >= set(way)]
    opening = {receiver: probes.actors[receiver].listen.remote() for _, receiver in ways}
    places = probes.answers(opening, "listen at its address")
    ways = [way for way in ways if way[1] in places and probes.actors.keys() >= set(way)]
    receiving = {receiver: probes.actors[receiver].receive.remote() for _, receiver in ways}
    sending = {
        sender: probes.actors[sender].send.remote(places[receiver], (probes.names[sender], probes.names[receiver]))
        for sender, receiver in ways
    }
    sent: dict[str, Link] = probes.answers(sending, "send to another node")
    receivers = [receiver for sender, receiver in ways if sender in sent and not sent[sender].failure]
    probes.answers({each: receiving[each] for each in receivers}, "receive from another node")
    return list(sent.values())
