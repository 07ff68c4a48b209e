"""Traffic from matrices of bytes, for tests."""

from collections.abc import Sequence

import numpy as np

from converters.cost import Traffic
from converters.topology import Topology


def traffic_of(
    topology: Topology, direct: Sequence[Sequence[int]], relayed: Sequence[Sequence[int]] | None = None
) -> Traffic:
    sent = np.array(direct, np.int64).reshape(len(topology.source_gpu), len(topology.destination_gpu))
    relayed_to = np.zeros((sent.shape[1],) * 2, np.int64) if relayed is None else np.array(relayed, np.int64)
    needed = sent.sum(axis=0) + relayed_to.sum(axis=0)
    per_node = np.zeros(topology.nodes, np.int64)
    return Traffic(
        topology=topology,
        direct=sent,
        relayed=relayed_to,
        needed=needed,
        staged=np.zeros_like(needed),
        entering=per_node,
        leaving={},
        pieces=np.count_nonzero(sent),
        relays=np.count_nonzero(relayed_to),
    )
