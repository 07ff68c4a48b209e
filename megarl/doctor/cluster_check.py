"""A look at all nodes of a Ray cluster at once, and at the ways between them."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from converters.errors import UserError
from megarl.cluster.joining import machines
from megarl.cluster.runtime import ray_cluster
from megarl.doctor.cluster_faults import Fault, find_faults
from megarl.doctor.node_probe import Link, Node, NodeProbe
from megarl.process.errors import RunFailed
from megarl.process.phase import phase
from megarl.schema import ClusterConfig

_START_S = 120.0
_ANSWER_S = 300.0


@dataclass(frozen=True)
class ClusterReport:
    """Nodes, the ways between them, and what is wrong."""

    nodes: list[Node]
    links: list[Link]
    faults: list[Fault]


class NodeSilent(RunFailed):
    """A node did not answer."""

    details = ""

    def __init__(self, addresses: Sequence[str], what: str, seconds: float) -> None:
        self.sentence = f"{', '.join(addresses)} did not {what} in {seconds:g} s: see to the Ray node there"
        super().__init__(self.sentence)


def check_cluster(folders: Sequence[str], inputs: Sequence[str] = ()) -> ClusterReport:
    """Measure the cluster that this process is connected to.

    All its nodes are to see what is written into the folders, and the inputs, which may be read-only.
    """
    alive = machines(ray.nodes())
    addresses = [node["NodeManagerAddress"] for node in alive]
    # Others that have a part of a node make it slow for a reason.
    free = [_is_free(node) for node in alive]
    probes = [
        _probe(node, gpus=node["Resources"].get("GPU", 0) if own else 0) for node, own in zip(alive, free, strict=True)
    ]
    try:
        _get([probe.clock.remote() for probe in probes], addresses, "start a process", _START_S)
        unseen = _unseen_folders(probes, addresses, folders)
        absent = _get(
            [probe.unseen.remote(list(inputs)) for probe in probes], addresses, "look for the inputs", _ANSWER_S
        )
        looking = [probe.look.remote(is_free=own) for probe, own in zip(probes, free, strict=True)]
        seen: list[Node] = _get(looking, addresses, "measure itself", _ANSWER_S)
        nodes = [
            replace(node, clock_offset_s=_offset(probe, node.address), unseen_folders=own, unseen_inputs=missing)
            for node, probe, own, missing in zip(seen, probes, unseen, absent, strict=True)
        ]
        links = _measure_links(nodes, probes)
    finally:
        for probe in probes:
            ray.kill(probe)
    return ClusterReport(nodes, links, find_faults(nodes, links))


def require_sound_nodes(config: ClusterConfig, folders: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """Raise UserError with what is wrong with the nodes of the cluster that the configuration names, or unseen there.

    Nothing is looked at on one machine, or without `check_nodes`. It leaves the cluster: what a try of a run has, Ray
    gives back as that leaves it, and not inside of another connection.
    """
    if config.address is None or not config.check_nodes:
        return
    with ray_cluster(config):
        if len(machines(ray.nodes())) < 2:
            return
        with phase("looking at the nodes"):
            faults = check_cluster(list(map(str, folders)), list(map(str, inputs))).faults
    if faults:
        raise UserError(
            f"{faults[0].node}: {faults[0].what}; {faults[0].remedy}, or start with it all the same"
            " (cluster.check_nodes=false)",
            "\n".join(f"{fault.node}: {fault.what}; {fault.remedy}" for fault in faults[1:]),
        )


def _is_free(node: Mapping[str, Any]) -> bool:
    """Whether nobody has a part of the node."""
    free = available_resources_per_node().get(node["NodeID"], {})
    return all(free.get(kind, 0) == node["Resources"].get(kind, 0) for kind in ("CPU", "GPU"))


def _probe(node: Mapping[str, Any], gpus: float) -> Any:
    actor = ray.remote(num_cpus=0, num_gpus=gpus, max_concurrency=2)(NodeProbe)
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return actor.options(scheduling_strategy=place).remote(node["NodeManagerAddress"])


def _offset(probe: Any, address: str) -> float:
    before = time.time()
    (there,) = _get([probe.clock.remote()], [address], "tell its time", _ANSWER_S)
    return there - (before + time.time()) / 2


def _unseen_folders(probes: Sequence[Any], addresses: Sequence[str], folders: Sequence[str]) -> list[tuple[str, ...]]:
    """The folders in which each node does not find what the first writes."""
    name = f".megarl-{secrets.token_hex(8)}"
    unseen: list[tuple[str, ...]] = [() for _ in probes]
    for folder in folders:
        # A file system may let it wait for ever.
        (failure,) = _get([probes[0].write.remote(folder, name)], addresses[:1], f"write into {folder}", _ANSWER_S)
        if failure:
            raise UserError(f"{addresses[0]} cannot write into {folder} ({failure}): make it, or name another folder")
        try:
            asked = [probe.sees.remote(folder, name) for probe in probes]
            found = _get(asked, addresses, f"look into {folder}", _ANSWER_S)
        finally:
            _get([probes[0].remove.remote(folder, name)], addresses[:1], f"write into {folder}", _ANSWER_S)
        unseen = [own if there else (*own, folder) for own, there in zip(unseen, found, strict=True)]
    return unseen


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of so many nodes, in rounds in which each has one other at most: so they do not disturb each other.

    Example: three nodes meet in [(0, 1)], [(2, 0)] and [(1, 2)], in some order.
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(one, other) for one, other in met if one is not None and other is not None]
        places = [places[0], places[-1], *places[1:-1]]


def _measure_links(nodes: Sequence[Node], probes: Sequence[Any]) -> list[Link]:
    links: list[Link] = []
    for pairs in rounds(len(nodes)):
        for way in (pairs, [(other, one) for one, other in pairs]):
            links += _measure(nodes, probes, way)
    return links


def _measure(nodes: Sequence[Node], probes: Sequence[Any], way: Sequence[tuple[int, int]]) -> list[Link]:
    addresses = ray.get([probes[receiver].listen.remote() for _, receiver in way])
    receiving = [probes[receiver].receive.remote() for _, receiver in way]
    sending = [
        probes[sender].send.remote(address, (nodes[sender].name, nodes[receiver].name))
        for (sender, receiver), address in zip(way, addresses, strict=True)
    ]
    names = [nodes[sender].address for sender, _ in way]
    links = _get(sending, names, "send to another node", _ANSWER_S)
    for link, received in zip(links, receiving, strict=True):
        if not link.failure:
            ray.get(received)
    return links


def _get(references: Sequence[ray.ObjectRef], addresses: Sequence[str], what: str, timeout_s: float) -> list[Any]:
    """Results in order. Raises NodeSilent with the addresses of those that give none."""
    _, missing = ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
    if missing:
        raise NodeSilent([addresses[references.index(each)] for each in missing], what, timeout_s)
    return ray.get(list(references))
