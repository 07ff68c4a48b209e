"""Forms in which vLLM keeps weights: those that can be written straight are traced, the others say why not."""

import pytest
import torch

from converters.architectures import read_architecture
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, NVFP4
from megarl.quickstart.tiny_models import IN_BLOCKS
from megarl.rollout.vllm.kind import VLLM


def _record_with(rank, shapes, dtypes, prepare):
    from megarl.rollout.vllm.tracing import trace_model

    prepare(rank.model)
    trace = trace_model(rank.model, rank.config.model_config, shapes, dtypes)
    assert trace.refused == {}
    return trace.untraced, [placement.hf_name for placement in trace.shard.placements]


def _permuted_experts(model):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    for module in model.modules():
        if hasattr(module, "unquantized_backend"):
            module.unquantized_backend = UnquantizedMoeBackend.FLASHINFER_CUTLASS


def _balanced_experts(model):
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            module.moe_config.moe_parallel_config.enable_eplb = True


def _stock_experts(model):
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kept = CPUUnquantizedExperts.apply
    CPUUnquantizedExperts.apply = lambda *_: None
    load = model.load_weights

    def load_weights(weights):
        CPUUnquantizedExperts.apply = kept
        return load(weights)

    model.load_weights = load_weights


def _packed_embedding(model):
    model.model.embed_tokens.cpu_linear = lambda *_: None


def _removed_weight(model):
    """As stock vLLM leaves a linear layer on a CPU."""
    model.model.layers[1].self_attn.o_proj.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def _processed_norm(model):
    model.model.norm.process_weights_after_loading = lambda: None


def _unknown_method(model):
    model.lm_head.quant_method = object()


@pytest.mark.parametrize(
    ("prepare", "concerned", "reason"),
    [
        (_permuted_experts, ".experts.", "the expert kernel FlashInfer CUTLASS may keep it in an order of its own"),
        (_balanced_experts, ".experts.", "the load balancer of the experts moves them"),
        (_stock_experts, ".experts.", "the expert kernel CPU may keep it in an order of its own"),
        (_packed_embedding, "embed_tokens", "the CPU backend multiplies by a packed copy of it"),
        (_removed_weight, "layers.1.self_attn.o_proj", "vLLM keeps it in another form than it is loaded in"),
        (_processed_norm, "model.norm.", "RMSNorm may change it after loading"),
        (_unknown_method, "lm_head", "object may keep it in another form than it is loaded in"),
    ],
)
def test_what_vllm_keeps_in_another_form_is_not_traced(ranks, tiny_config, prepare, concerned, reason):
    folder, config = tiny_config("qwen3_moe")
    architecture = read_architecture(config)
    arguments = architecture.hf_shapes, architecture.hf_dtypes(torch.float32), prepare
    ((reasons, placed),) = ranks(_record_with, folder, {}, *arguments)
    assert set(reasons) == {name for name in architecture.hf_shapes if concerned in name}
    assert all(reason in each for each in reasons.values())
    assert set(placed) == architecture.hf_shapes.keys() - reasons.keys()


def _linear_layers_in_fp8(model):
    return [module for module in model.modules() if type(getattr(module, "quant_method", None)).__name__ == FP8_LAYER]


def _experts(model):
    return [module for module in model.modules() if hasattr(module, "w13_weight")]


def _as_triton_leaves_them(model):
    """After the processing of vLLM's kernels of a GPU: parameters of a plain class and without their attributes."""
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel as Kernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.utils import replace_parameter

    kernel = Kernel.__new__(Kernel)
    for module in _linear_layers_in_fp8(model):
        Kernel.process_weights_after_loading(kernel, module)
        module.quant_method.fp8_linear = kernel
    for module in _experts(model):
        module.quant_method.fp8_backend = Fp8MoeBackend.TRITON
        for name, parameter in list(module.named_parameters(recurse=False)):
            replace_parameter(module, name, parameter.data)


def _as_deep_gemm_leaves_them(model, scales_dtype=torch.float32):
    """The same for DeepGEMM, which packs the scales on Blackwell and leaves them on Hopper; experts, too."""
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel as Kernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    from megarl.rollout.vllm import tracing

    _as_triton_leaves_them(model)
    kernel = Kernel.__new__(Kernel)
    kernel.use_deep_gemm_e8m0 = True
    tracing.is_deep_gemm_e8m0_used = lambda: True
    for module in _linear_layers_in_fp8(model):
        module.quant_method.fp8_linear = kernel
        module.weight_scale_inv.data = module.weight_scale_inv.data.to(scales_dtype)
    for module in _experts(model):
        module.quant_method.fp8_backend = Fp8MoeBackend.DEEPGEMM
        module.w13_weight_scale_inv.data = module.w13_weight_scale_inv.data.to(scales_dtype)


def _as_flashinfer_leaves_them(model):
    """The same for the kernel that vLLM takes on Hopper with FlashInfer, and the experts' by Triton."""
    from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import (
        FlashInferFp8DeepGEMMDynamicBlockScaledKernel as Kernel,
    )
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    _as_deep_gemm_leaves_them(model)
    for module in _linear_layers_in_fp8(model):
        kernel = Kernel.__new__(Kernel)
        kernel.fallback = module.quant_method.fp8_linear
        module.quant_method.fp8_linear = kernel
    for module in _experts(model):
        module.quant_method.fp8_backend = Fp8MoeBackend.TRITON


def _as_on_blackwell(model):
    _as_deep_gemm_leaves_them(model, torch.int32)


FP8_LAYER = "Fp8LinearMethod"
PACKED = "DeepGEMM packs its scales for this GPU"
ROUNDED = "they are that from the start with rollout.weights=fp8_block_ue8m0"


@pytest.mark.parametrize(
    ("number_format", "prepare", "reason"),
    [
        (FP8_BLOCK, _as_triton_leaves_them, None),
        (FP8_BLOCK, _as_deep_gemm_leaves_them, ROUNDED),
        (FP8_BLOCK_UE8M0, _as_deep_gemm_leaves_them, None),
        (FP8_BLOCK_UE8M0, _as_flashinfer_leaves_them, None),
        (FP8_BLOCK_UE8M0, _as_on_blackwell, PACKED),
    ],
)
def test_codes_are_traced_where_the_kernels_of_a_gpu_keep_them(ranks, tiny_config, number_format, prepare, reason):
    folder, config = tiny_config("qwen3_moe", **IN_BLOCKS["qwen3_moe"])
    architecture = read_architecture(config)
    shapes, dtypes = number_format.checkpoint(architecture, architecture.hf_dtypes(torch.float32))
    given = VLLM.quantised({}, number_format, architecture)
    ((reasons, placed),) = ranks(_record_with, folder, given, shapes, dtypes, prepare)
    quantised = number_format.quantised_names(architecture)
    concerned = {*quantised, *map(number_format.scales_name, quantised)} if reason else set()
    assert set(reasons) == concerned
    assert all(reason in each for each in reasons.values())
    assert set(placed) == shapes.keys() - concerned


def _as_loaded(_model):
    pass


def test_codes_that_share_a_byte_are_left_to_the_loader_of_the_engine(ranks, tiny_config):
    folder, config = tiny_config("qwen3_moe", **IN_BLOCKS["qwen3_moe"])
    architecture = read_architecture(config)
    shapes, dtypes = NVFP4.checkpoint(architecture, architecture.hf_dtypes(torch.float32))
    ((reasons, placed),) = ranks(
        _record_with, folder, VLLM.quantised({}, NVFP4, architecture), shapes, dtypes, _as_loaded
    )
    assert set(reasons) == shapes.keys() - architecture.hf_shapes.keys()
    assert set(placed) == shapes.keys() & architecture.hf_shapes.keys()
