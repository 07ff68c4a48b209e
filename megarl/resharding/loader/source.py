"""A Megatron rank as a source of weights: its boxes of HF tensors, written where the receivers read them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from converters.architectures import Architecture
from converters.copying import copy_transfers
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ModuleNames, ParallelSizes, megatron_layout
from converters.plan import Transfer, plan
from megarl.resharding.loader.buckets import Bucket, views
from megarl.resharding.shared_memory import map_segment


class WeightSource:
    """The part that one rank plays in every refit.

    The plan from the Megatron layout to whole HF tensors is made once. In each refit every rank copies its own
    transfers into the bucket, so that a tensor cut over ranks is put together in the shared memory and nowhere else.
    """

    def __init__(
        self,
        architecture: Architecture,
        parallel: ParallelSizes,
        rank: int,
        tensors: Mapping[str, Tensor],
        module_names: ModuleNames,
    ) -> None:
        layout = megatron_layout(architecture, parallel, module_names=module_names)
        transfers = plan(layout, huggingface_layout(architecture.hf_shapes))
        self._tensors = tensors
        self._transfers: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            if transfer.source_rank == rank:
                self._transfers[transfer.hf_name].append(transfer)
        self._segments: list[Tensor] = []

    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of every HF tensor of which this rank sends a part."""
        return {name: self._tensors[sent[0].source_name].dtype for name, sent in self._transfers.items()}

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the segments that buckets are written to."""
        self._segments = [map_segment(path, segment_bytes) for path in segments]

    def write(self, bucket: Bucket) -> None:
        """Copy this rank's boxes of the bucket's tensors into the bucket's segment."""
        destinations = views(bucket, self._segments[bucket.segment])
        mine = [transfer for name in destinations for transfer in self._transfers.get(name, ())]
        copy_transfers(mine, self._tensors, destinations)
