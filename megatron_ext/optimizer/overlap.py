"""Overlaps communication with computation, as Megatron's own training loop does.

megatron-core leaves two things to the caller of its schedules: telling them how to reduce gradients after the last
micro-batch, and completing the weights before anything but a forward pass reads them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megatron_ext.optimizer.optimizer import Wrapped


@contextmanager
def overlapping(chunks: Sequence[Wrapped]) -> Iterator[None]:
    """Within the context, schedules reduce the gradients of `chunks` only in the last micro-batch's backward pass.

    Otherwise every backward pass counts, and with `overlap_grad_reduce` the reduction would start after as many passes
    as the first step had, whatever the number of micro-batches: later gradients would be lost.
    """
    config, fields = chunks[0].config, _schedule_fields(chunks)
    before = {name: getattr(config, name) for name in fields}
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _schedule_fields(chunks: Sequence[Wrapped]) -> dict[str, Any]:
    """The fields of TransformerConfig that configure this for the schedules."""
    distributed = chunks[0].ddp_config
    fields: dict[str, list[Any]] = {}
    if distributed.overlap_grad_reduce:
        fields["no_sync_func"] = [chunk.no_sync for chunk in chunks]
        # Makes pipeline stages start their reductions together, as is Megatron's default (--align-grad-reduce).
        fields["grad_sync_func"] = [chunk.start_grad_sync for chunk in chunks]
    if gathers_in_forward(chunks) and distributed.align_param_gather:
        fields["param_sync_func"] = [chunk.start_param_sync for chunk in chunks]
    return {name: each[0] if len(chunks) == 1 else each for name, each in fields.items()}


def gathers_in_forward(chunks: Sequence[Wrapped]) -> bool:
    """Whether after an optimizer step each rank has only its own part of the new weights (`overlap_param_gather`).

    The next forward pass then gathers the others.
    """
    return isinstance(chunks[0], DistributedDataParallel) and bool(chunks[0].use_forward_hook)


def gather_weights(chunks: Sequence[Wrapped]) -> None:
    """Collective: gather the weights that an optimizer step left to the next forward pass to gather."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
