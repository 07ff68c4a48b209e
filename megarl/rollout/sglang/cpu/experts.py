"""Experts in SGLang on a CPU (0.5.23): its own layers, with expert parallelism, number formats and adapters in torch.

SGLang runs experts with adapters in its Triton runner on every device, and experts without them in torch on a CPU.
Adapters are stored where its layers keep them on a GPU, sharded over workers by SGLang.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.number_formats import NumberFormat

_TORCH = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
_RUNNER = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"


def register_hooks() -> None:
    """Register these hooks with SGLang: a correction, and replacements of its Triton kernels."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TORCH, leave_out_experts_of_others, HookType.AROUND)
    for function, stand_in in (
        (f"{_RUNNER}._prepare_fused_moe_run", leave_tokens_unsorted),
        (f"{_RUNNER}._fused_moe_kernel_sequence", multiply_by_experts),
        ("sglang.srt.lora.lora_moe_runners._compute_lora_alignment", adapters_of_tokens),
        ("sglang.kernels.ops.lora.moe.fused_moe_lora_kernel.fused_moe_lora", add_updates),
    ):
        HookRegistry.register(function, stand_in, HookType.REPLACE)


def leave_out_experts_of_others(
    original: Callable[..., Tensor], layer: Any, x: Tensor, chosen: Any, config: Any
) -> Tensor:
    """Skip experts of other workers for tokens [T, H]: SGLang numbers them -1, and its lookup fails."""
    is_here = chosen.topk_ids >= 0
    if is_here.all():
        return original(layer, x, chosen, config)
    outputs = x.new_zeros(*chosen.topk_ids.shape, x.shape[-1])
    if is_here.any():
        rows = x[:, None].expand_as(outputs)[is_here]
        of_rows = {name: getattr(chosen, name)[is_here][:, None] for name in ("topk_ids", "topk_weights")}
        outputs[is_here] = original(layer, rows, chosen._replace(**of_rows), config)
    return outputs.sum(1)


def multiply_by_decoded_experts(number_format: NumberFormat) -> Callable[[Any, Any, Any], Any]:
    """Make the method `apply` of experts with quantised weights.

    It dequantises the matrices of each expert that has a token, for SGLang's own torch code.
    """

    def apply(method: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x = dispatch_output.hidden_states
        decoded = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=_Decoded(number_format, layer, "w13_weight", x.dtype),
            w2_weight=_Decoded(number_format, layer, "w2_weight", x.dtype),
        )
        output = moe_forward_native(decoded, x, dispatch_output.topk_output, method.moe_runner_config)
        return StandardCombineInput(hidden_states=output)

    return apply


class _Decoded:
    """The matrices of experts [experts, rows, columns], each dequantised on access."""

    def __init__(self, number_format: NumberFormat, layer: Any, name: str, dtype: torch.dtype) -> None:
        self._format, self._dtype = number_format, dtype
        self._codes: Tensor = getattr(layer, name).data
        self._scales: Tensor = getattr(layer, number_format.scales_name(name)).data

    def __getitem__(self, expert: int) -> Tensor:
        return self._format.dequantise(self._codes[expert], self._scales[expert], self._dtype)


def leave_tokens_unsorted(*_: Any, **__: Any) -> tuple[None, None, bool, bool, None, None, None]:
    """Neither sort tokens by expert nor choose block sizes: only the replaced kernels need that."""
    return None, None, False, False, None, None, None


def multiply_by_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *_of_kernels: Any,
    hooks: Any,
    activation: str,
    is_gated: bool,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> Tensor:
    """The outputs of experts for tokens [T, H]; w1 [E, 2I, H] is gate above up, w2 [E, H, I], weights and ids [T, K].

    `hooks` add the updates of adapters in place. The factor of routed experts is the model's on a CPU.
    """
    if activation != "silu" or not is_gated or apply_router_weight_on_input:
        raise NotImplementedError(f"adapters of experts with activation {activation} on a CPU")
    tokens, top_k = topk_ids.shape
    experts = topk_ids.flatten()
    both = _products(hidden_states.repeat_interleave(top_k, 0), w1, experts)
    if hooks is not None and hooks.after_gate_up:
        hooks.after_gate_up(hidden_states, both.view(tokens, top_k, -1), topk_weights, topk_ids)
    gate, up = both.chunk(2, -1)
    inner = F.silu(gate) * up
    outputs = _products(inner, w2, experts) * topk_weights.flatten()[:, None].to(inner.dtype)
    outputs = outputs.view(tokens, top_k, -1)
    if hooks is not None and hooks.after_down:
        hooks.after_down(inner, outputs, topk_weights, topk_ids)
    return outputs.sum(1)


def adapters_of_tokens(topk_ids: Tensor, lora_info: Any) -> tuple[Tensor, Tensor, None, None]:
    """Return each token's adapter (-1 for none) and experts, in place of tokens sorted by both."""
    return lora_info.token_lora_mapping, topk_ids, None, None


def add_updates(
    *,
    output: Tensor,
    qcurr_hidden_states: Tensor,
    lora_a_stacked: list[Tensor],
    lora_b_stacked: list[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    top_k_num: int,
    mul_routed_weight: bool = False,
    **_: Any,
) -> None:
    """Add B A x to `output` [T, K, sum of rows of B] for each slice of A and B [slots, E, ...]; B includes the scale.

    x has a row per token, or one per expert of a token. Both ids come from `adapters_of_tokens`.
    """
    rows = qcurr_hidden_states
    if len(rows) != expert_ids.numel():
        rows = rows.repeat_interleave(top_k_num, 0)
    experts, adapters = expert_ids.flatten(), sorted_token_ids.repeat_interleave(top_k_num)
    weights = topk_weights.flatten()[:, None].to(rows.dtype) if mul_routed_weight else torch.ones_like(rows[:, :1])
    for slot in adapters.unique().tolist():
        if slot >= 0:
            parts = [
                _products(_products(rows, a[slot], experts), b[slot], experts)
                for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
            ]
            output += (torch.cat(parts, -1) * weights * (adapters == slot)[:, None]).view(output.shape)


def _products(rows: Tensor, matrices: Tensor, experts: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert."""
    products = rows.new_empty(len(rows), matrices.shape[1])
    for expert in experts.unique().tolist():
        of_expert = experts == expert
        products[of_expert] = F.linear(rows[of_expert], matrices[expert])
    return products
