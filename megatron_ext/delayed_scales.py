"""Initial scales for Transformer Engine's 8-bit matmuls with delayed scaling.

Delayed scaling goes by the maxima of earlier passes, and takes them in only after a pass with a gradient. A run's
first passes have none: log-probs and values would be computed with scales of 1, for which most weights are subnormal.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_ext import device
from megatron_ext.forward import forward, predict_nothing
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import MicroBatch

_PASSES = 2
"""After the first pass the scales of weights are right, and after the second those of activations."""


class DelayedScales:
    """The delayed scales of a model's `chunks`, if its `options` use delayed scaling."""

    def __init__(self, chunks: Sequence[torch.nn.Module], options: MegatronOptions) -> None:
        self._chunks = chunks
        self._micro_batches = options.micro_batch_multiple
        self._are_known = not options.scales_by_history

    def learn(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Find scales by passes over `micro_batches` whose results are discarded, before the first pass that counts.

        Does nothing if a checkpoint had scales. Collective over all ranks of the model.
        """
        if self._are_known:
            return
        self._are_known = True
        found = torch.tensor(int(any(map(_has_scales, self._modules()))), device=device.device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found:
            return
        for _ in range(_PASSES):
            forward(self._chunks, micro_batches[: self._micro_batches], predict_nothing)
            _update()

    def _modules(self) -> list[torch.nn.Module]:
        return [module for chunk in self._chunks for module in chunk.modules()]


def _has_scales(module: torch.nn.Module) -> bool:
    """Whether a module has scales other than the initial ones."""
    state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
    return state is not None and bool((state.scale != 1).any())


def _update() -> None:
    """Update scales from the passes since the last update, as Transformer Engine does after a pass with a gradient."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
