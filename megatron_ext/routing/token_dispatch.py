"""All-gather dispatch of tokens to experts, for ranks with different numbers of tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor


class RaggedAllGather(MoEAllGatherTokenDispatcher):
    """megatron-core's all-gather dispatcher, for ragged micro-batches.

    Every rank pads its tokens to the largest number in its group. Padding goes to no expert and is cut off from the
    result.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Pad the hidden states [T, 1, H] and the routing [T, experts] of this rank to [T', H] and [T', experts]."""
        shape, tokens = hidden_states.shape, len(routing_map)
        rows = (0, 0, 0, self._most(hidden_states, tokens) - tokens)
        padded, probs = super().dispatch_preprocess(
            F.pad(hidden_states.view(tokens, shape[-1]), rows), F.pad(routing_map, rows), F.pad(probs, rows)
        )
        self.hidden_shape = shape
        return padded, probs

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Cut the experts' outputs [T', H] to [T, 1, H]."""
        tokens = self.hidden_shape[0] * self.hidden_shape[1]
        return super().combine_postprocess(hidden_states[:tokens])

    def _most(self, on_device: Tensor, tokens: int) -> int:
        if self.tp_ep_group.size() == 1:
            return tokens
        most = on_device.new_tensor(tokens, dtype=torch.long)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        return int(most)
