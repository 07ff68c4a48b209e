"""The weights of a reference model, which are exchanged with the policy's when it computes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class ReferenceWeights:
    """A copy of a rank's tensors, by their names in the Megatron layout."""

    def __init__(self, present: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in present.items()}
        self.refreshed = False
        """Whether they differ from the initial weights, so that checkpoints must include them."""

    @torch.no_grad()
    def refresh(self, present: Mapping[str, Tensor]) -> None:
        """Copy the values of `present`, which has the same names."""
        for name, tensor in self.tensors.items():
            tensor.copy_(present[name])
        self.refreshed = True

    @contextmanager
    def exchanged(self, present: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the context, the `present` tensors have the reference's values, and the reference has theirs."""
        self._exchange(present)
        try:
            yield
        finally:
            self._exchange(present)

    @torch.no_grad()
    def _exchange(self, present: Mapping[str, Tensor]) -> None:
        for name, reference in self.tensors.items():
            kept = present[name].clone()
            present[name].copy_(reference)
            reference.copy_(kept)
