"""Comparisons of the bytes that `megarl plan` counts with those of a refit to workers whose layout was traced."""

import numpy as np
import torch

from converters.cost import formats, traffic
from megarl.planning.cluster import Cluster
from megarl.planning.refit import PlannedRefit
from megarl.resharding.alignment import ALIGNMENT_BYTES
from megarl.resharding.direct.transfer_spec import TransferSpec


def planned_refit(architecture, trainer, engine, *, replicas=1, number_format=None, cluster=None):
    """The refit that `megarl plan` plans where it is given these sizes, by default of machines of 8 GPUs."""
    return PlannedRefit(
        architecture=architecture,
        engine_architecture=architecture,
        trainer=trainer,
        engine=engine,
        replicas=replicas,
        number_format=number_format,
        cluster=cluster or Cluster(),
    )


def check_that_it_is_traced(refit, traces, quantisation=None):
    """Look that each rank sends, and each worker gets, relays and needs as much as is planned, in float32."""
    topology = refit.cluster.topology(refit.trainer.world_size, refit.destinations, colocated=False)
    spec = TransferSpec(
        refit.architecture, refit.trainer, "te", traces, refit.replicas, topology, 100_000, quantisation
    )
    spec.check(refit.architecture.hf_dtypes(torch.float32))
    traced = traffic(spec.plan, formats(refit.architecture, number_format=refit.number_format, dtype=torch.float32))
    planned = refit.traffic(torch.float32)
    for name in ("direct", "relayed", "needed", "staged"):
        assert np.array_equal(getattr(planned, name), getattr(traced, name)), name
    sent = [spec.outgoing(rank).values() for rank in range(refit.trainer.world_size)]
    check_moved(planned, sum(each.size_bytes for of_rank in sent for messages in of_rank for each in messages))


def check_moved(planned, size_bytes):
    """Look that trainer ranks sent as much as is planned, but for the room between tensors, and scales, in messages."""
    beyond = size_bytes - planned.direct.sum()
    assert 0 <= beyond < 2 * ALIGNMENT_BYTES * planned.pieces
