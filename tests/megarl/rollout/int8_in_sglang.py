"""Program: print what SGLang's own layers in INT8 do with weights when they have come, and what they multiply, as JSON.

It runs in the environment that has SGLang: `python int8_in_sglang.py`.
"""

import json
from unittest import mock

import torch
import torch.nn.functional as F

from converters.number_formats import INT8_CHANNEL
from megarl.rollout.sglang import cpu, int8, tracing

cpu.corrections.install()

from sglang.srt.layers.moe import MoeRunnerConfig  # noqa: E402 (what it needs is above)
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization import w8a8_int8  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

TOKENS, EXPERTS, HIDDEN, INNER = 5, 3, 64, 32
SHAPES = {"w13_weight": (EXPERTS, 2 * INNER, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, INNER)}


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT, X, BIAS = random(INNER, HIDDEN), random(TOKENS, HIDDEN), random(INNER)
OF_EXPERTS = {name: random(*shape) for name, shape in SHAPES.items()}
ROUTED = StandardTopKOutput(
    random(TOKENS, 2).sigmoid(), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]), random(TOKENS, EXPERTS)
)


def loader(*_, **__):
    """Stands for the loader that the parameters of a layer name."""


def linear_layer():
    layer = torch.nn.Module()
    layer.quant_method = w8a8_int8.W8A8Int8LinearMethod(w8a8_int8.W8A8Int8Config())
    layer.quant_method.create_weights(layer, HIDDEN, [INNER], HIDDEN, INNER, torch.float32, weight_loader=loader)
    for parameter, part in zip((layer.weight, layer.weight_scale), INT8_CHANNEL.quantise(WEIGHT), strict=True):
        parameter.data.copy_(part)
    return layer


def layer_of_experts():
    layer = torch.nn.Module()
    layer.num_experts = EXPERTS
    layer.quant_method = w8a8_int8.W8A8Int8MoEMethod(w8a8_int8.W8A8Int8Config())
    layer.quant_method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.float32, weight_loader=loader)
    layer.quant_method.create_moe_runner(layer, MoeRunnerConfig())
    for name, weights in OF_EXPERTS.items():
        for expert, weight in enumerate(weights):
            codes, scales = INT8_CHANNEL.quantise(weight)
            getattr(layer, name).data[expert].copy_(codes)
            getattr(layer, INT8_CHANNEL.scales_name(name)).data[expert].copy_(scales)
    return layer


def after_loading(layer, device):
    """Shapes of the parameters with a loader, and without, after each of two updates; None where SGLang refuses."""
    found = []
    patches = {"_is_cpu": device == "cpu", "_is_cpu_amx_available": False, "_is_cpu_arm64": False}
    with mock.patch.multiple(w8a8_int8, **patches):
        for _ in range(2):
            try:
                layer.quant_method.process_weights_after_loading(layer)
            except AssertionError:
                return None
            found.append(
                {name: [list(each.shape), hasattr(each, "weight_loader")] for name, each in layer.named_parameters()}
            )
    return found


def int8_product(x, weight, x_scale, weight_scale, out_dtype, bias=None):
    """The product of whole numbers, for what `int8_scaled_mm` of SGLang's package of kernels takes alone."""
    assert (x.dtype, weight.dtype, weight.stride(0)) == (torch.int8, torch.int8, 1)
    assert x_scale.numel() == x.shape[0]
    assert weight_scale.numel() == weight.shape[1]
    whole = x.long() @ weight.long()
    return (whole * x_scale.view(-1, 1) * weight_scale.view(1, -1)).to(out_dtype) + bias


def quantised(x):
    codes, scales = INT8_CHANNEL.quantise(x)
    return codes, scales


def difference(found, expected):
    return float((found - expected).norm() / expected.norm())


def linear_difference(weight):
    """How far the product of a layer is from that of `weight`."""
    layer = linear_layer()
    layer.quant_method.process_weights_after_loading(layer)
    return difference(layer.quant_method.apply(layer, X, BIAS), F.linear(X, weight, BIAS))


def difference_on_a_gpu(weight):
    """The same by SGLang's lines for a GPU, around kernels in torch."""
    with mock.patch.multiple(w8a8_int8, create=True, per_token_quant_int8=quantised, int8_scaled_mm=int8_product):
        return linear_difference(weight)


def experts_difference(weights):
    layer = layer_of_experts()
    layer.quant_method.process_weights_after_loading(layer)
    given = StandardDispatchOutput(hidden_states=X, hidden_states_scale=None, topk_output=ROUTED)
    expected = torch.zeros(TOKENS, HIDDEN)
    for token, experts in enumerate(ROUTED.topk_ids.tolist()):
        for place, expert in enumerate(experts):
            gate, up = (weights["w13_weight"][expert] @ X[token]).chunk(2)
            output = weights["w2_weight"][expert] @ (F.silu(gate) * up)
            expected[token] += ROUTED.topk_weights[token, place] * output
    return difference(layer.quant_method.apply(layer, given).hidden_states, expected)


def decoded(weight):
    return INT8_CHANNEL.dequantise(*INT8_CHANNEL.quantise(weight), torch.float32)


def failure(function, *arguments):
    """Name of the error that a function raises, of whatever a CPU lacks; None where it works."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - see above
        return type(error).__name__
    return None


LAYERS = {"linear": linear_layer, "experts": layer_of_experts}
DECODED = {name: torch.stack([decoded(each) for each in weights]) for name, weights in OF_EXPERTS.items()}


def hooked(*registering):
    HookRegistry.reset()
    for register in registering:
        register()
    HookRegistry.apply_hooks()


def main():
    found = {
        "by itself": {name: after_loading(make(), "gpu") for name, make in LAYERS.items()},
        "by itself on a CPU": after_loading(linear_layer(), "cpu"),
        "products by itself": [failure(linear_difference, WEIGHT), failure(experts_difference, OF_EXPERTS)],
        "float32 by itself": torch.float32 in w8a8_int8.W8A8Int8Config.get_supported_act_dtypes(),
    }
    hooked(int8.register_hooks)
    found["with hooks"] = {name: after_loading(make(), "gpu") for name, make in LAYERS.items()}
    found["reasons"] = [tracing._reason(make()) for make in LAYERS.values()]
    found["by the kernel"] = difference_on_a_gpu(decoded(WEIGHT))
    hooked(int8.register_hooks, cpu.int8.register_hooks)
    found["decoded"] = [linear_difference(decoded(WEIGHT)), experts_difference(DECODED)]
    found["not decoded"] = [linear_difference(WEIGHT), experts_difference(OF_EXPERTS)]
    found["float32"] = torch.float32 in w8a8_int8.W8A8Int8Config.get_supported_act_dtypes()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
