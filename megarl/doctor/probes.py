"""Queries the probes on a cluster's nodes together: one that fails is a fault of its node, and not queried again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.doctor.cluster_faults import LEAVE_OUT, Fault
from megarl.doctor.node_probe import NodeProbe, first_line

START_S = 120.0
ANSWER_S = 300.0


class Probes:
    """Probes on Ray nodes, which get all GPUs of their node if its address is in `free`. They end with the context."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], free: Sequence[str]) -> None:
        self.faults: list[Fault] = []
        self.names = {
            node["NodeManagerAddress"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            for node in nodes
        }
        """Address -> unique name."""
        self.actors = {node["NodeManagerAddress"]: _probe(node, free) for node in nodes}
        """Address -> the probe that answers there."""

    def __enter__(self) -> Self:
        asked = {address: actor.name.remote() for address, actor in self.actors.items()}
        names = self.answers(asked, "start a process", START_S)
        counts = Counter(names.values())
        self.names |= {address: name if counts[name] == 1 else f"{name} ({address})" for address, name in names.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self.actors.values():
            ray.kill(actor)

    def answers(self, begun: Mapping[str, ray.ObjectRef], what: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Address -> answer, of the probes that answer; `what` names the task in the fault of a node that does not."""
        timeout_s = ANSWER_S if timeout_s is None else timeout_s
        silent = set(ray.wait(list(begun.values()), num_returns=len(begun), timeout=timeout_s)[1]) if begun else set()
        found = {}
        for address, reference in begun.items():
            if reference in silent:
                self._drop(address, f"it did not {what} in {timeout_s:g} s", "see to the Ray node there")
                continue
            try:
                found[address] = ray.get(reference)
            except RayTaskError as error:
                self._drop(address, f"it did not {what} ({first_line(error.cause or error)})", LEAVE_OUT)
            except RayError:
                self._drop(address, f"it did not {what}: its process died, or its Ray node", LEAVE_OUT)
        return found

    def _drop(self, address: str, what: str, remedy: str) -> None:
        # It may be queried twice at the same time.
        if (actor := self.actors.pop(address, None)) is not None:
            self.faults.append(Fault(self.names[address], what, remedy))
            ray.kill(actor)


def _probe(node: Mapping[str, Any], free: Sequence[str]) -> Any:
    # Only on free nodes, as others' work would slow the measurement down.
    gpus = node["Resources"].get("GPU", 0) if node["NodeManagerAddress"] in free else 0
    actor = ray.remote(num_cpus=0, num_gpus=gpus, max_concurrency=2)(NodeProbe)
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return actor.options(scheduling_strategy=place).remote(node["NodeManagerAddress"])
