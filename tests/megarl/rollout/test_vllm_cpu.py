"""The corrections of vLLM on a CPU, each beside what vLLM does without it.

Their purpose is tested on whole models in test_vllm_models.py (weights, rotary), test_vllm_sampling.py (seeds) and
test_vllm_parallel.py (experts of data-parallel ranks), test_sleep.py (memory of sleepers).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.vllm import cpu


def _linear_weights():
    from vllm.model_executor.layers import utils

    def after_dispatch():
        layer = torch.nn.Linear(64, 32, bias=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer

    stock = after_dispatch()
    cpu.keep_linear_weights()
    corrected = after_dispatch()
    torch.nn.init.constant_(corrected.weight, 2.0)
    return tuple(stock.weight.shape), corrected.cpu_linear(torch.ones(1, 64), corrected.weight, None).tolist()


def test_linear_weights_stay(vllm_process):
    stock_shape, product = vllm_process(_linear_weights)
    assert stock_shape == (0,)
    assert product == [[128.0] * 32]


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
    cpu.rotate_split_heads_in_torch()
    return stock, list(errors())


def test_rotary_embeddings_of_split_heads(vllm_process):
    stock, corrected = vllm_process(_rotary)
    assert max(stock) > 0.1
    assert max(corrected) < 1e-5


def test_torch_cannot_wind_a_cpu_generator_back():
    assert not cpu.engine_arguments({})["enable_chunked_prefill"]
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
    cpu._apply_experts(
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


def test_unknown_expert_activations_are_refused():
    with pytest.raises(NotImplementedError, match="swigluoai"):
        cpu._apply_experts(
            SimpleNamespace(w1_bias=None, w2_bias=None),
            *[torch.empty(1)] * 6,
            SimpleNamespace(value="swigluoai"),
            None,
            False,
        )
