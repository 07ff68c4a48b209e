"""Transports: how the bytes of a refit get from the trainer's ranks to the engines' workers."""

from collections.abc import Mapping

from megarl.resharding.direct.transports.endpoint import Rendezvous, Transport
from megarl.resharding.direct.transports.mapped import CUDA_IPC, SHARED_MEMORY
from megarl.resharding.direct.transports.per_pair import per_pair
from megarl.resharding.direct.transports.rdma import RDMA
from megarl.resharding.direct.transports.tcp import TCP
from megatron_ext import device

TRANSPORTS: Mapping[str, Transport] = {
    "shared_memory": SHARED_MEMORY,
    "cuda_ipc": CUDA_IPC,
    "rdma": RDMA,
    "tcp": TCP,
}

MAPPED_MEMORY_TRANSPORT: Mapping[str, str] = {"gloo": "shared_memory", "nccl": "cuda_ipc"}
"""Collective backend of the device -> name of the transport through memory that the ranks of one host map."""


def transport_of(rendezvous: Rendezvous) -> Transport:
    """The transport of all ranks of a rendezvous."""
    between = TRANSPORTS[rendezvous.transport]
    if rendezvous.topology is None:
        return between
    return per_pair(TRANSPORTS[MAPPED_MEMORY_TRANSPORT[device.backend()]], between)
