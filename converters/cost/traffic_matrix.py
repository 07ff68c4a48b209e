"""Traffic: how many bytes go from every rank to every other."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converters.topology import Topology


@dataclass(frozen=True)
class Traffic:
    """The bytes of a plan, arrays all int64. Destination rank = replica x workers + worker.

    `direct` and `relayed` count what travels, the others what is needed in the destination's type: where source and
    destination cut through an FP8 block, bfloat16 travels and FP8 is needed.
    """

    topology: Topology
    direct: np.ndarray
    """[source ranks, destination ranks]: what a source sends to a destination."""
    relayed: np.ndarray
    """[destination ranks, destination ranks]: what a destination relays to another of its node (NVLink)."""
    needed: np.ndarray
    """[destination ranks]: what a destination must hold."""
    staged: np.ndarray
    """[destination ranks]: values that a destination stages because cuts of the source go through blocks."""
    entering: np.ndarray
    """[nodes]: what any destination of a node needs and no source of it holds: it must come in through its NICs."""
    leaving: Mapping[tuple[int, ...], int]
    """Source ranks -> bytes that only they hold, counted once per node that needs them and has no source with them: one
    of these ranks must send them out through its NIC."""
    pieces: int
    """Number of transfers from sources to destinations."""
    relays: int
    """Number of transfers from destinations to destinations."""
