"""Reloads of vLLM's models: what CUDA graphs would have captured stays where it was."""

import weakref

import pytest
import torch

from converters.architectures import read_architecture
from converters.number_formats import MXFP8, NVFP4
from megarl.quickstart.tiny_models import IN_BLOCKS
from megarl.rollout.vllm.kind import VLLM


def codes(shapes, names, number_format, seed=1):
    """Weights as a refit brings them: codes and scales of the matrices that are in the format."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        weight = 0.02 * torch.randn(shape, generator=generator)
        if name in names:
            yield from number_format.tensors(name, weight)
        else:
            yield name, weight


def quantised(tiny_config, name, number_format, **fields):
    """A folder with a model's config, the engine's arguments, and what `codes` takes."""
    folder, config = tiny_config(name, **{**IN_BLOCKS.get(name, IN_BLOCKS["qwen3"]), **fields})
    architecture = read_architecture(config)
    names = number_format.quantised_names(architecture)
    return folder, VLLM.quantised({}, number_format, architecture), architecture.hf_shapes, names, number_format


def _reload(rank, *weights):
    from megarl.rollout.vllm.reload import Reload

    reload = Reload(rank.model, rank.config.model_config)
    with torch.no_grad():
        rank.model.load_weights(codes(*weights))
    reload.finish()
    return reload


def _as_with_locks(model):
    """Let linear kernels make tensors of their own after loading, as Humming's does; one holds what codes give."""
    from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel as Kernel

    class OfAnotherPackage:
        def __init__(self):
            self.table = torch.zeros(8)

    def process(self, layer):
        self.locks = torch.zeros(8)
        self.first_scale = layer.weight_scale[:1].float().expand(4, -1)
        self.foreign = OfAnotherPackage()

    Kernel.process_weights_after_loading = process
    layers = [module for module in model.modules() if hasattr(module, "scheme")]
    for layer in layers:
        layer.scheme.kernel.process_weights_after_loading(layer)
    return layers


def _addresses_and_values(rank, *weights):
    layers = _as_with_locks(rank.model)
    experts = [module for module in rank.model.modules() if hasattr(module, "w13_weight_scale")]
    kernels = [layer.scheme.kernel for layer in layers]
    captured = [(kernel.locks, kernel.first_scale) for kernel in kernels]
    foreign = [weakref.ref(kernel.foreign.table) for kernel in kernels]
    first = _reload(rank, *weights, 1)
    _reload(rank, *weights, 2)
    stay = [
        kernel.locks is locks and kernel.first_scale is scale
        for kernel, (locks, scale) in zip(kernels, captured, strict=True)
    ]
    right = [torch.equal(layer.scheme.kernel.first_scale[3], layer.weight_scale[0].float()) for layer in layers]
    of_experts = [
        scales.scale is parameter
        for each in experts
        for config in (each.quant_method.moe_quant_config, each.quant_method.moe_kernel.fused_experts.quant_config)
        for scales, parameter in ((config._w1, each.w13_weight_scale), (config._w2, each.w2_weight_scale))
    ]
    held = [reference() is not None for reference in foreign]
    return [all(each) and len(each) > 1 for each in (stay, right, of_experts, held)], first is not None


def test_tensors_of_kernels_stay_where_graphs_read_them(ranks, tiny_config):
    folder, given, *weights = quantised(tiny_config, "qwen3_moe", MXFP8)
    assert ranks(_addresses_and_values, folder, given, *weights) == [([True] * 4, True)]


def _as_humming_leaves_biases(model):
    """Padded and in another order, in plain parameters."""

    def process(_self, layer):
        if layer.bias is not None:
            layer.bias = torch.nn.Parameter(_permuted(layer.bias.data), requires_grad=False)

    layers = [module for module in model.modules() if hasattr(module, "scheme")]
    type(layers[0].scheme.kernel).process_weights_after_loading = process
    for layer in layers:
        process(None, layer)


def _permuted(bias):
    return torch.nn.functional.pad(bias.flip(0), (0, 8))


def _trace_and_reload(rank, shapes, *others):
    from megarl.rollout.vllm.tracing import trace_model

    _as_humming_leaves_biases(rank.model)
    weights = list(codes(shapes, *others))
    given = {name: tuple(tensor.shape) for name, tensor in weights}, {name: tensor.dtype for name, tensor in weights}
    trace = trace_model(rank.model, rank.config.model_config, *given)
    attention = rank.model.model.layers[1].self_attn.qkv_proj
    captured = attention.bias
    _reload(rank, shapes, *others)
    loaded = torch.cat([dict(weights)[f"model.layers.1.self_attn.{each}_proj.bias"] for each in "qkv"])
    kept = attention.bias is captured
    return trace.refused, set(trace.untraced), kept, torch.equal(attention.bias, _permuted(loaded))


@pytest.mark.parametrize("number_format", [MXFP8, NVFP4], ids=lambda each: each.name)
def test_biases_that_a_kernel_permutes_are_loaded_anew(ranks, tiny_config, number_format):
    folder, given, *weights = quantised(tiny_config, "qwen2", number_format, head_dim=16)
    ((refused, untraced, kept, right),) = ranks(_trace_and_reload, folder, given, *weights)
    assert refused == {}
    assert {name for name in weights[0] if name.endswith(".bias")} <= untraced
    assert kept
    assert right


def _waiting(rank, *weights):
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    from megarl.rollout.vllm.reload import Reload

    reload = Reload(rank.model, rank.config.model_config)
    with torch.no_grad():
        rank.model.load_weights(codes(*weights))
    waiting = {type(module).__name__ for module in rank.model.modules() if LAYERWISE_INFO[module].loaded_weights}
    reload.finish()
    return waiting


@pytest.mark.parametrize("number_format", [MXFP8, NVFP4], ids=lambda each: each.name)
def test_layers_are_complete_with_what_a_refit_brings(ranks, tiny_config, number_format):
    folder, given, *weights = quantised(tiny_config, "qwen3_moe", number_format)
    # These two have rows of padding.
    assert ranks(_waiting, folder, given, *weights) == [{"VocabParallelEmbedding", "ParallelLMHead"}]
