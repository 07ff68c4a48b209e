"""All contenders by name, in the order of the first round."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from resharding.contenders.direct import Direct, DirectChanges
from resharding.contenders.gathered import Gathered
from resharding.contenders.hand_over import Broadcast, InSharedMemory
from resharding.contenders.megatron_core import MegatronCore
from resharding.contenders.memcpy import Memcpy
from resharding.contenders.nixl_read import SOCKETS, NixlRead
from resharding.party import Party


class Contender(Protocol):
    """One rank's part in a way of moving weights; all ranks create and run it together."""

    moved_bytes: int
    """Bytes that this rank sends in a run."""

    def run(self) -> None:
        """Move everything once."""

    def wipe(self) -> None:
        """Overwrite what was written here."""

    def wrong(self) -> list[str]:
        """Names of tensors or buffers with wrong values; empty if all are right."""


MEMCPY = "memcpy"
NIXL_READ = "NIXL read"
NIXL_READ_SOCKETS = "NIXL read (sockets)"
NIXL_READ_CHECKSUMS = "NIXL read, checksums"
NIXL_READ_CHECKSUMS_SOCKETS = "NIXL read, checksums (sockets)"
DIRECT = "direct, checksums"
DIRECT_WITHOUT_CHECKSUMS = "direct, no checksums"
DIRECT_GLOO = "direct, checksums (gloo)"
DIRECT_RDMA = "direct, checksums (rdma)"
DIRECT_RDMA_WITHOUT_CHECKSUMS = "direct, no checksums (rdma)"
DIRECT_RDMA_SOCKETS = "direct, checksums (rdma, sockets)"
FP8 = "direct, FP8"
FP8_GLOO = "direct, FP8 (gloo)"
FP8_RDMA = "direct, FP8 (rdma)"
FP8_RDMA_SOCKETS = "direct, FP8 (rdma, sockets)"
IN_FP8 = (FP8, FP8_GLOO, FP8_RDMA, FP8_RDMA_SOCKETS)
"""Contenders for FP8 engines that do not split blocks."""
CHANGES = "direct, changes"
CHANGES_GLOO = "direct, changes (gloo)"
CHANGES_RDMA_SOCKETS = "direct, changes (rdma, sockets)"
DIRECT_TO_MEGATRON = "direct, checksums, to Megatron"
DIRECT_GLOO_TO_MEGATRON = "direct, checksums (gloo), to Megatron"
MEGATRON_CORE = "megatron.core.resharding (gloo), to Megatron"
GATHERED_BROADCAST = "all-gather, broadcast (gloo)"
GATHERED_SHARED = "all-gather (gloo), shared memory"
ON_GPU = (DIRECT, DIRECT_WITHOUT_CHECKSUMS, DIRECT_GLOO, DIRECT_RDMA, FP8, FP8_GLOO, FP8_RDMA)
"""Contenders that move weights from and to a GPU."""
CONTENDERS: Mapping[str, Callable[[Party], Contender]] = {
    MEMCPY: Memcpy,
    NIXL_READ: NixlRead,
    NIXL_READ_SOCKETS: partial(NixlRead, ucx_tls=SOCKETS),
    NIXL_READ_CHECKSUMS: partial(NixlRead, with_checksum=True),
    NIXL_READ_CHECKSUMS_SOCKETS: partial(NixlRead, with_checksum=True, ucx_tls=SOCKETS),
    DIRECT: partial(Direct, destination="engine", with_checksum=True),
    DIRECT_WITHOUT_CHECKSUMS: partial(Direct, destination="engine", with_checksum=False),
    DIRECT_GLOO: partial(Direct, destination="engine", with_checksum=True, transport="tcp"),
    DIRECT_RDMA: partial(Direct, destination="engine", with_checksum=True, transport="rdma"),
    DIRECT_RDMA_WITHOUT_CHECKSUMS: partial(Direct, destination="engine", with_checksum=False, transport="rdma"),
    DIRECT_RDMA_SOCKETS: partial(Direct, destination="engine", with_checksum=True, transport="rdma", ucx_tls=SOCKETS),
    FP8: partial(Direct, destination="engine, FP8", with_checksum=True),
    FP8_GLOO: partial(Direct, destination="engine, FP8", with_checksum=True, transport="tcp"),
    FP8_RDMA: partial(Direct, destination="engine, FP8", with_checksum=True, transport="rdma"),
    FP8_RDMA_SOCKETS: partial(Direct, destination="engine, FP8", with_checksum=True, transport="rdma", ucx_tls=SOCKETS),
    CHANGES: partial(DirectChanges, destination="changes, shared_memory", transport="shared_memory"),
    CHANGES_GLOO: partial(DirectChanges, destination="changes, tcp", transport="tcp"),
    CHANGES_RDMA_SOCKETS: partial(DirectChanges, destination="changes, rdma", transport="rdma", ucx_tls=SOCKETS),
    GATHERED_BROADCAST: partial(Gathered, hand_over=Broadcast),
    GATHERED_SHARED: partial(Gathered, hand_over=InSharedMemory),
    DIRECT_TO_MEGATRON: partial(Direct, destination="megatron", with_checksum=True),
    DIRECT_GLOO_TO_MEGATRON: partial(Direct, destination="megatron", with_checksum=True, transport="tcp"),
    MEGATRON_CORE: MegatronCore,
}
