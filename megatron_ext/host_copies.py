"""Host memory for a copy of what a rank saves, made once and used again by every save."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron_ext import device

_ALIGNMENT_BYTES = 64


class HostCopies:
    """Copies of tensors in one piece of host memory, as long as the longest list of them; pinned, beside a GPU."""

    def __init__(self) -> None:
        self._memory = device.host_memory(0)

    def of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Copies of the `tensors`, in their order; they last until the next call.

        Other work that was asked of the device may go on meanwhile, but for what changes the `tensors`.
        """
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if end > len(self._memory):
            self._memory = self._memory[:0].clone()  # let go of the old before there is a new one
            self._memory = device.host_memory(end)
        copies, stream = [], device.SideStream()
        with stream.entered():
            for tensor, offset in zip(tensors, offsets, strict=True):
                place = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies.append(place.copy_(tensor.detach(), non_blocking=True))
        stream.synchronize()
        return iter(copies)
