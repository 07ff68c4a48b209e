"""A Megatron rank as a source of weights: writes its boxes of HF tensors to segments that the receivers read."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from converters.architectures import Architecture
from converters.copying import copy_transfers
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ModuleNames, ParallelSizes, megatron_layout
from converters.number_formats import NUMBER_FORMATS, NumberFormat
from converters.plan import Transfer, plan
from megarl.resharding.loader.buckets import Bucket, views
from megarl.resharding.shared_memory import map_segment


class WeightSource:
    """The source of weights of one rank, in every refit.

    The plan from the Megatron layout to whole HF tensors is made once. In each refit every rank copies its own boxes
    into the bucket, so a sharded tensor is assembled in the shared memory and nowhere else.
    """

    def __init__(
        self,
        architecture: Architecture,
        parallel: ParallelSizes,
        rank: int,
        tensors: Mapping[str, Tensor],
        module_names: ModuleNames,
    ) -> None:
        self._shapes = architecture.hf_shapes
        layout = megatron_layout(architecture, parallel, module_names=module_names)
        transfers = plan(layout, huggingface_layout(architecture.hf_shapes))
        self._tensors = tensors
        self._transfers: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            if transfer.source_rank == rank:
                self._transfers[transfer.hf_name].append(transfer)
        self._segments: list[Tensor] = []

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every HF tensor of which this rank sends a part."""
        return {name: self._tensors[sent[0].source_name].dtype for name, sent in self._transfers.items()}

    def cut_blocks(self, number_format: NumberFormat, names: Collection[str]) -> set[str]:
        """The names of tensors of which this rank sends some block only in part, so that it cannot quantise them."""
        return {
            name
            for name in self._transfers.keys() & names
            for transfer in self._transfers[name]
            if not number_format.is_whole(transfer.destination_box, self._shapes[name])
        }

    def sources(self, bucket: Bucket) -> set[str]:
        """The names of this rank's tensors from which it fills the bucket."""
        return {sent.source_name for entry in bucket.entries for sent in self._transfers.get(entry.name, ())}

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the segments that buckets are written to."""
        self._segments = [map_segment(path, segment_bytes) for path in segments]

    def write(self, bucket: Bucket) -> None:
        """Write this rank's boxes of the bucket's tensors, or their codes and scales, to the bucket's segment.

        Raises ValueError, naming the tensor, for weights that cannot be quantised.
        """
        destinations = views(bucket, self._segments[bucket.segment])
        plain: list[Transfer] = []
        for entry in bucket.entries:
            mine = self._transfers.get(entry.name, [])
            if entry.scales_offset_bytes is None:
                plain += mine
            else:
                self._quantise(mine, NUMBER_FORMATS[entry.number_format], destinations)
        copy_transfers(plain, self._tensors, destinations)

    def _quantise(
        self, transfers: Sequence[Transfer], number_format: NumberFormat, destinations: Mapping[str, Tensor]
    ) -> None:
        for transfer in transfers:
            box, name = transfer.destination_box, transfer.hf_name
            weight = self._tensors[transfer.source_name][transfer.source_box.slices()]
            codes = destinations[name][box.slices()]
            scales = destinations[number_format.scales_name(name)][number_format.scales_box(box).slices()]
            try:
                _quantise_into(number_format, weight.detach(), codes, scales)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


def _quantise_into(number_format: NumberFormat, weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise a weight on its own device, and write the codes and scales to the host."""
    if weight.is_cpu:
        number_format.quantise_into(weight, codes, scales)
        return
    # Quantising on the weight's device is faster, and codes are half the bytes to copy to the host.
    made_codes, made_scales = number_format.quantise(weight)
    codes.copy_(made_codes)
    scales.copy_(made_scales)
