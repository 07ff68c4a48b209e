"""Reloads of vLLM's models: what CUDA graphs would have captured stays where it was."""

import re
import weakref
from unittest.mock import patch

import pytest
import torch
from vllm_ranks import random_tensors

from converters.architectures import read_architecture
from converters.number_formats import INT8_CHANNEL, MXFP8, NVFP4, NumberFormat
from megarl.quickstart.tiny_models import IN_BLOCKS
from megarl.resharding.loader.buckets import Quantised, cut_into_buckets, views
from megarl.resharding.shared_memory import Segment
from megarl.rollout.vllm.kind import VLLM

SHARED_OUT = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def codes(shapes, names, number_format, seed=1):
    """Weights as a refit brings them: codes and scales of the matrices that are in the format."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        weight = 0.02 * torch.randn(shape, generator=generator)
        if name in names:
            yield from number_format.tensors(name, weight)
        else:
            yield name, weight


def quantised(tiny_config, name, number_format, engine_args=None, **fields):
    """A folder with a model's config, the engine's arguments, and what `codes` takes."""
    folder, config = tiny_config(name, **{**IN_BLOCKS.get(name, IN_BLOCKS["qwen3"]), **fields})
    architecture = read_architecture(config)
    names = number_format.quantised_names(architecture)
    return (
        folder,
        VLLM.quantised(engine_args or {}, number_format, architecture),
        architecture.hf_shapes,
        names,
        number_format,
    )


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


def _as_kernels_keep_experts(layer):
    pass


def _as_humming_leaves_experts(layer):
    """In plain parameters, which have no loader."""
    for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
        parameter = getattr(layer, name)
        delattr(layer, name)
        setattr(layer, name, torch.nn.Parameter(parameter.data, requires_grad=False))


def _as_it_travels(shapes, names, number_format):
    """Weights, with codes and scales beside them or in their place."""
    weights = random_tensors(shapes)
    return weights | {made: each for name in names for made, each in number_format.tensors(name, weights[name])}


def _refit_by_buckets(rank, leave_experts, shapes, names, number_format):
    """A refit with a tensor in each bucket.

    Returns the experts that the model's loader met, those that were quantised here, and whether each layer has its own.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from megarl.rollout.vllm.weight_transfer import BucketWritten, Segments, SharedMemoryTransfer

    experts = {name: module for name, module in rank.model.named_modules() if isinstance(module, RoutedExperts)}
    method = type(next(iter(experts.values())).quant_method)
    process = method.process_weights_after_loading

    def process_and_leave(self, layer):
        process(self, layer)
        leave_experts(layer)

    for layer in experts.values():
        leave_experts(layer)
    tensors = _as_it_travels(shapes, names, number_format)
    quantised = Quantised(number_format, names, names if number_format.elements_per_code > 1 else ())
    segment = Segment(2**20)
    transfer = SharedMemoryTransfer(rank.config.weight_transfer_config, rank.config, torch.device("cpu"), rank.model)
    transfer.init_transfer_engine(Segments([segment.handle()], 2**20))
    with (
        patch.object(method, "process_weights_after_loading", process_and_leave),
        patch.object(NumberFormat, "tensors", autospec=True, side_effect=NumberFormat.tensors) as quantise,
        patch.object(rank.model, "load_weights", wraps=rank.model.load_weights) as load,
    ):
        transfer.start_weight_update()
        for name, shape in shapes.items():
            (bucket,) = cut_into_buckets({name: shape}, {name: torch.float32}, 2**20, 1, quantised)
            for each, view in views(bucket, segment.memory).items():
                view.copy_(tensors[each])
            transfer.receive_weights(BucketWritten(bucket))
        transfer.finish_weight_update()
    met = [name for call in load.call_args_list for name, _ in call.args[0]]
    quantised_here = [call.args[1] for call in quantise.call_args_list]
    right = [_has_its_own(layer, name, tensors, number_format.codes_suffix) for name, layer in experts.items()]
    return _experts_among(met), _experts_among(quantised_here), right


def _has_its_own(layer, name, tensors, suffix):
    """Whether the codes of a layer are those of its experts: the first half of all on the first rank."""
    prefix = name[: name.index("experts")]
    experts = sorted(_experts_among(each for each in tensors if each.startswith(prefix)))
    half = len(experts) // 2
    codes = [
        [tensors[f"{prefix}experts.{expert}.{kind}_proj.weight{suffix}"] for kind in ("gate", "up", "down")]
        for expert in (experts[:half] if torch.distributed.get_rank() == 0 else experts[half:])
    ]
    w13 = torch.stack([torch.cat([gate, up]) for gate, up, _ in codes])
    w2 = torch.stack([down for _, _, down in codes])
    pairs = (layer.w13_weight, w13), (layer.w2_weight, w2)
    return all(torch.equal(held.view(torch.uint8), made.view(torch.uint8)) for held, made in pairs)


def _experts_among(names):
    return {int(found[1]) for name in names if (found := re.search(r"\.experts\.(\d+)\.", name))}


@pytest.mark.parametrize(
    ("name", "number_format", "leave_experts"),
    [
        ("qwen3_moe", NVFP4, _as_kernels_keep_experts),
        ("deepseek_v3", NVFP4, _as_kernels_keep_experts),
        ("qwen3_moe", MXFP8, _as_humming_leaves_experts),
        ("qwen3_moe", INT8_CHANNEL, _as_kernels_keep_experts),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_a_worker_loads_its_own_experts_and_meets_no_others(ranks, tiny_config, name, number_format, leave_experts):
    folder, given, *weights = quantised(tiny_config, name, number_format, SHARED_OUT)
    results = ranks(_refit_by_buckets, folder, given, leave_experts, *weights)
    experts = _experts_among(weights[0])
    first = set(range(len(experts) // 2))
    for (met, quantised_here, right), held in zip(results, (first, experts - first), strict=True):
        assert met == held
        assert quantised_here == (held if number_format is NVFP4 else set())
        assert right
        assert all(right)
