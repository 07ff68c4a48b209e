"""Typed transfers: the transfers of a plan with the dtype in which they travel, and their scales."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from converters.boxes import Box
from converters.plan import Transfer


@dataclass(frozen=True, slots=True)
class Scales:
    """The box of a destination tensor that receives the scales of some codes."""

    name: str
    box: Box
    number_format: str
    """Name of the number format of codes and scales."""


@dataclass(frozen=True, slots=True)
class TypedTransfer:
    """A box of a source tensor, and the box of a destination tensor that it goes to, in `dtype`.

    With `scales` it is quantised at the source: `dtype` is that of the codes, and the scales travel with them.
    """

    source_name: str
    source_box: Box
    destination_name: str
    destination_box: Box
    dtype: torch.dtype
    scales: Scales | None = None


def plain(transfer: Transfer, dtypes: Mapping[str, torch.dtype]) -> TypedTransfer:
    """The typed transfer of a transfer that is not quantised; `dtypes` are those of the destination's tensors."""
    name = transfer.destination_name
    return TypedTransfer(transfer.source_name, transfer.source_box, name, transfer.destination_box, dtypes[name])
