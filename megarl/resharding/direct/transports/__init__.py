"""Ways in which the bytes of a refit get from the trainer's ranks to the engines' workers."""

from collections.abc import Mapping

from megarl.resharding.direct.transports.endpoint import Transport
from megarl.resharding.direct.transports.mapped import CUDA_IPC, SHARED_MEMORY
from megarl.resharding.direct.transports.point_to_point import POINT_TO_POINT

TRANSPORTS: Mapping[str, Transport] = {
    "shared_memory": SHARED_MEMORY,
    "cuda_ipc": CUDA_IPC,
    "point_to_point": POINT_TO_POINT,
}

MAPPED: Mapping[str, str] = {"gloo": "shared_memory", "nccl": "cuda_ipc"}
"""Name of the transport through memory that the ranks of one host map, by the collective backend of their device."""
