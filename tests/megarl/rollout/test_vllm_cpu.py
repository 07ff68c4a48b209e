"""The corrections of vLLM on a CPU, each beside what vLLM does without it.

Their purpose is tested on whole models in test_vllm_models.py (weights, rotary), test_vllm_sampling.py (seeds),
test_vllm_same_bits.py (linear layers), test_vllm_parallel.py (experts of data-parallel ranks), test_sleep.py (memory of
sleepers).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from engine_host import vllm_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.number_formats import FP8_BLOCK, INT8_CHANNEL, MXFP8, NVFP4
from megarl.rollout.vllm import cpu


def _linear_weights():
    from vllm.model_executor.layers import utils

    def after_dispatch():
        layer = torch.nn.Linear(64, 32, bias=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer

    stock = after_dispatch()
    cpu.corrections.keep_linear_weights()
    corrected = after_dispatch()
    torch.nn.init.constant_(corrected.weight, 2.0)
    return tuple(stock.weight.shape), corrected.cpu_linear(torch.ones(1, 64), corrected.weight, None).tolist()


def test_linear_weights_stay(vllm_process):
    stock_shape, product = vllm_process(_linear_weights)
    assert stock_shape == (0,)
    assert product == [[128.0] * 32]


def _rows_of_an_output_layer():
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    processor = SimpleNamespace(head_dtype=torch.float32)
    head = SimpleNamespace(
        weight=torch.randn(256, 1024, dtype=torch.bfloat16), quant_method=UnquantizedEmbeddingMethod()
    )
    hidden = torch.randn(64, 1024, dtype=torch.bfloat16)

    def logits(rows):
        return LogitsProcessor._apply_head(processor, head, hidden[:rows], None)

    stock = [logits(rows) for rows in (1, 64)]
    cpu.corrections.give_output_layers_enough_rows()
    corrected = [logits(rows) for rows in (1, 64)]
    return [torch.equal(one[0], all_rows[0]) for one, all_rows in (stock, corrected)], corrected[0].shape


def test_a_row_of_an_output_layer_in_float32_has_the_same_bits_in_any_batch(vllm_process):
    assert vllm_process(_rows_of_an_output_layer) == ([False, True], (1, 256))


def _rotary():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    positions, query, key = torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 1, 64)

    def errors():
        for neox in (True, False):
            with set_current_vllm_config(VllmConfig()):
                rotary = RotaryEmbedding(64, 64, 128, 10000.0, neox, torch.float32)
            for tensors in ((query, key), (query.flatten(1), key.flatten(1))):
                expected = rotary.forward_native(positions, *[tensor.clone() for tensor in tensors])
                given = rotary.forward_cpu(positions, *[tensor.clone() for tensor in tensors])
                yield max(float((a - b).abs().max()) for a, b in zip(expected, given, strict=True))

    stock = list(errors())
    cpu.corrections.rotate_split_heads_in_torch()
    return stock, list(errors())


def test_rotary_embeddings_of_split_heads(vllm_process):
    stock, corrected = vllm_process(_rotary)
    assert max(stock) > 0.1
    assert max(corrected) < 1e-5


def _continuations():
    """Tokens sampled with one seed: all at once, and the rest after cuts, stock and corrected."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    current_platform.import_kernels()
    sampler, tokens, cuts = TopKTopPSampler("processed_logprobs"), 40, (0, 1, 2, 17, 39)
    logits = torch.randn(tokens, 1, 500, generator=torch.Generator().manual_seed(0))

    def sample(first, extra_args=None):
        parameters = SamplingParams(seed=5, extra_args=extra_args)
        state = CachedRequestState("0", [1], [], parameters, torch.Generator().manual_seed(5), ([],), 0, [])
        return [int(sampler.forward_cpu(row, {0: state.generator}, None, None)[0]) for row in logits[first:]]

    def state():
        return sample(0), [sample(cut, {cpu.corrections.DRAWN: cut}) for cut in cuts]

    stock = state()
    cpu.corrections.continue_random_streams()
    corrected = state()
    # A greedy request has no generator.
    CachedRequestState(
        "0", [1], [], SamplingParams(temperature=0, extra_args={cpu.corrections.DRAWN: 3}), None, ([],), 0, []
    )
    return cuts, stock, corrected


def test_a_continued_response_draws_what_it_would_have_drawn(vllm_process):
    cuts, (whole, stock), corrected = vllm_process(_continuations)
    rests = [whole[cut:] for cut in cuts]
    assert corrected == (whole, rests)
    assert [rest == expected for rest, expected in zip(stock, rests, strict=True)] == [True] + [False] * 4


def test_torch_cannot_wind_a_cpu_generator_back():
    assert not cpu.corrections.engine_arguments({})["enable_chunked_prefill"]
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()


@given(
    tokens=st.integers(1, 9),
    experts=st.integers(1, 5),
    top_k=st.integers(1, 3),
    ranks=st.integers(1, 2),
    weigh=st.booleans(),
    seed=st.integers(0, 99),
)
def test_experts_equal_one_token_at_a_time(tokens, experts, top_k, ranks, weigh, seed):
    generator = torch.Generator().manual_seed(seed)
    everywhere = experts * ranks
    hidden, w1, w2 = (
        torch.randn(shape, generator=generator) for shape in ((tokens, 8), (experts, 12, 8), (experts, 8, 6))
    )
    ids = torch.randint(everywhere, (tokens, top_k), generator=generator, dtype=torch.int32)
    weights = torch.rand((tokens, top_k), generator=generator)
    # The last of `ranks` ranks: its experts are numbered from 0, those of others are -1.
    expert_map = torch.cat([torch.full((everywhere - experts,), -1), torch.arange(experts)]) if ranks > 1 else None
    output = torch.empty(tokens, 8)
    cpu.experts._apply_experts(
        SimpleNamespace(w1_bias=None, w2_bias=None),
        output=output,
        hidden_states=hidden,
        w1=w1,
        w2=w2,
        topk_weights=weights,
        topk_ids=ids,
        activation=SimpleNamespace(value="silu"),
        expert_map=expert_map,
        apply_router_weight_on_input=not weigh,
    )
    expected = torch.zeros(tokens, 8)
    for token in range(tokens):
        for k in range(top_k):
            expert = int(ids[token, k]) - (everywhere - experts)
            if expert >= 0:
                gate, up = (w1[expert] @ hidden[token]).chunk(2)
                expected[token] += (weights[token, k] if weigh else 1) * (w2[expert] @ (F.silu(gate) * up))
    assert torch.allclose(output, expected, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_experts_are_of_tokens_that_have_one(ranks):
    generator = torch.Generator().manual_seed(0)
    tokens, experts, hidden_size, width, rank = 7, 3, 8, 6, 2

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    hidden, w1, w2 = (
        drawn(tokens, hidden_size),
        drawn(experts, 2 * width, hidden_size),
        drawn(experts, hidden_size, width),
    )
    first_a, first_b = ([drawn(1, experts, *shape) for _ in range(2)] for shape in ((rank, hidden_size), (width, rank)))
    second_a, second_b = drawn(1, experts, rank, width), drawn(1, experts, hidden_size, rank)
    ids = torch.stack([torch.randperm(experts * ranks, generator=generator)[:2] for _ in range(tokens)])
    expert_map = torch.tensor([-1] * experts * (ranks - 1) + list(range(experts)))
    adapted = torch.tensor([0, -1, 0, 0, -1, 0, -1])
    slot = SimpleNamespace(
        w13_lora_a_stacked=first_a,
        w13_lora_b_stacked=first_b,
        w2_lora_a_stacked=[second_a],
        w2_lora_b_stacked=[second_b],
        punica_wrapper=SimpleNamespace(token_lora_indices=adapted),
    )
    routed = torch.rand(tokens, 2, generator=generator), ids, SimpleNamespace(value="silu"), expert_map, False

    def output(context, *weights):
        found = torch.empty(tokens, hidden_size)
        experts = SimpleNamespace(w1_bias=None, w2_bias=None, _lora_context=context)
        cpu.experts._apply_experts(experts, found, hidden, *weights, *routed)
        return found

    updates = [b[0] @ a[0] for a, b in zip(first_a, first_b, strict=True)]
    merged = output(None, w1 + torch.cat(updates, dim=1), w2 + second_b[0] @ second_a[0])
    expected = torch.where(adapted[:, None] == 0, merged, output(None, w1, w2))
    torch.testing.assert_close(output(slot, w1, w2), expected, atol=1e-4, rtol=1e-4)


def _experts_beside_a_slot():
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    def chosen():
        config = FusedMoEConfig(
            num_experts=4,
            experts_per_token=2,
            hidden_dim=64,
            intermediate_size=64,
            num_local_experts=4,
            num_logical_experts=4,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.float32,
            is_lora_enabled=True,
        )
        backend, experts = unquantized_fused_moe_method.select_unquantized_moe_backend(config)
        return backend.name, experts.supports_lora(), experts._supports_current_device()

    stock = chosen()
    cpu.experts.choose_experts_that_take_adapters()
    return stock, chosen()


def test_experts_beside_a_slot_are_those_of_a_cpu(vllm_process):
    stock, corrected = vllm_process(_experts_beside_a_slot)
    assert stock == ("TRITON", True, False)
    assert corrected == ("CPU", True, True)


def test_unknown_expert_activations_are_refused():
    with pytest.raises(NotImplementedError, match="swigluoai"):
        cpu.experts._apply_experts(
            SimpleNamespace(w1_bias=None, w2_bias=None),
            *[torch.empty(1)] * 6,
            SimpleNamespace(value="swigluoai"),
            None,
            False,
        )


def _codes():
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    def state():
        supported = CPUFp8BlockScaledMMKernel.is_supported()[0], CPUExpertsFp8._supports_current_device()
        return supported, torch.float32 in Fp8Config.get_supported_act_dtypes(), cpu.fp8.codes_are_kept()

    stock = state()
    cpu.fp8.install()
    cpu.fp8.take_float32_activations()
    kernel = CPUFp8BlockScaledMMKernel.__new__(CPUFp8BlockScaledMMKernel)
    torch.manual_seed(0)
    weight, x = torch.randn(130, 256), torch.randn(3, 256)
    codes, scales = FP8_BLOCK.quantise(weight)
    layer = SimpleNamespace(
        weight=torch.nn.Parameter(codes.clone(), False), weight_scale_inv=torch.nn.Parameter(scales)
    )
    kernel.process_weights_after_loading(layer)
    kept = torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    product = kernel.apply_weights(layer, x, torch.ones(130))
    expected = x @ FP8_BLOCK.dequantise(codes, scales, torch.float32).T + 1
    right = torch.allclose(product, expected, atol=1e-4)
    return torch.cpu._is_amx_tile_supported(), stock, state(), kept, right, _other_codes()


def _other_codes():
    """Whether layers in INT8 and MXFP8 keep codes, and multiply by them, before and after the corrections."""
    from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    def works(number_format, kernel):
        weight, x = torch.randn(64, 128), torch.randn(3, 128)
        codes, scales = (torch.nn.Parameter(part, False) for part in number_format.quantise(weight))
        layer = torch.nn.Module()
        layer.weight, layer.weight_scale, layer.bias, layer.logical_widths = codes, scales, None, [64]
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        kernel().process_weights_after_loading(layer)
        if layer.weight is not codes:
            return False
        product = kernel().apply_weights(layer, x, torch.ones(64))
        return torch.allclose(product, x @ number_format.dequantise(codes, scales, torch.float32).T + 1, atol=1e-4)

    def of_int8():
        config = SimpleNamespace(is_static_input_scheme=False, is_channelwise=True, input_symmetric=True)
        names = "weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"
        return CPUInt8ScaledMMLinearKernel(config, names)

    def of_mxfp8():
        return init_mxfp8_linear_kernel(weight_shape=(64, 128))

    def state():
        try:
            in_mxfp8 = works(MXFP8, of_mxfp8)
        except ValueError as error:
            in_mxfp8 = str(error).strip()
        return works(INT8_CHANNEL, of_int8), in_mxfp8, cpu.number_formats.codes_are_kept()

    stock = state()
    cpu.number_formats.install()
    return stock, state()


@pytest.mark.long
def test_codes_in_fp8_stay_and_are_multiplied_on_any_cpu():
    # A process of its own: where an engine's configuration was made, one of the corrections is in force.
    with vllm_pool() as process:
        amx, stock, corrected, kept, right, others = process.apply(_codes)
    assert stock == ((amx, amx), False, False)
    assert corrected == ((True, True), True, True)
    assert kept
    assert right
    no_kernel = "Failed to find a kernel that can implement the MXFP8 linear layer. Reasons:"
    assert others == ((False, no_kernel, False), (True, True, True))


APPLY = {
    FP8_BLOCK: cpu.fp8._apply,
    INT8_CHANNEL: cpu.number_formats._apply_int8,
    MXFP8: cpu.number_formats._apply_mxfp8,
    NVFP4: cpu.number_formats._apply_nvfp4,
}


@pytest.mark.parametrize("number_format", APPLY, ids=lambda each: each.name)
@settings(max_examples=20)
@given(experts=st.integers(1, 4), tokens=st.integers(1, 5), seed=st.integers(0, 99))
def test_experts_in_a_format_are_those_of_the_decoded_weights(number_format, experts, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randn(shape, generator=generator) for shape in ((experts, 256, 160), (experts, 160, 128)))
    hidden = torch.randn(tokens, 160, generator=generator)
    ids = torch.randint(experts, (tokens, 2), generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    coded = [[number_format.quantise(each) for each in stacked] for stacked in (w1, w2)]
    (codes1, scales1), (codes2, scales2) = ([torch.stack(part) for part in zip(*each, strict=True)] for each in coded)
    decode = number_format.dequantise
    decoded = [torch.stack([decode(*each, torch.float32) for each in stacked]) for stacked in coded]
    of_codes, of_values = torch.empty(tokens, 160), torch.empty(tokens, 160)
    routed = weights, ids, SimpleNamespace(value="silu"), None, False
    kernel = SimpleNamespace(w1_scale=scales1, w2_scale=scales2)
    APPLY[number_format](kernel, of_codes, hidden, codes1, codes2, *routed)
    cpu.experts._apply_experts(SimpleNamespace(w1_bias=None, w2_bias=None), of_values, hidden, *decoded, *routed)
    assert torch.equal(of_codes, of_values)
