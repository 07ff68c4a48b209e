"""Communication that overlaps with computation, arranged as Megatron's own training loop does.

megatron-core only offers it: whoever runs the schedules says which micro-batch is the last, and completes the weights
before they are read otherwise than by a forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megatron_ext.optimizer.optimizer import Wrapped


@contextmanager
def overlapping(chunks: Sequence[Wrapped]) -> Iterator[None]:
    """Inside, the schedules reduce the gradients of `chunks` in the backward pass of the last micro-batch alone.

    Otherwise every backward pass counts, and with `overlap_grad_reduce` the reduction starts at the count of the first
    step, whatever the number of micro-batches: what comes after is lost.
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
    """Fields of TransformerConfig through which the schedules are told."""
    distributed = chunks[0].ddp_config
    fields: dict[str, list[Any]] = {}
    if distributed.overlap_grad_reduce:
        fields["no_sync_func"] = [chunk.no_sync for chunk in chunks]
        # Pipeline stages then start their reductions together, Megatron's default (--align-grad-reduce).
        fields["grad_sync_func"] = [chunk.start_grad_sync for chunk in chunks]
    if gathers_in_forward(chunks) and distributed.align_param_gather:
        fields["param_sync_func"] = [chunk.start_param_sync for chunk in chunks]
    return {name: each[0] if len(chunks) == 1 else each for name, each in fields.items()}


def gathers_in_forward(chunks: Sequence[Wrapped]) -> bool:
    """Whether an optimizer step leaves each rank with its own part of the new weights, for the next forward pass to
    gather the others' (`overlap_param_gather`).
    """
    return isinstance(chunks[0], DistributedDataParallel) and bool(chunks[0].use_forward_hook)


def gather_weights(chunks: Sequence[Wrapped]) -> None:
    """Collective: complete what an optimizer step left to the next forward pass, which then finds nothing to do."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
