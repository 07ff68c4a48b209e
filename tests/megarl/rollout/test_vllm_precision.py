"""In bfloat16 the engine chooses the experts that the trainer chooses, and its logits are as exact where wanted."""

import socket

import pytest
import torch

from megatron_ext import device

device.install()

from megatron.core.transformer.moe.moe_utils import router_gating_linear  # noqa: E402 (after the device layer)

from megarl.config.compose import compose  # noqa: E402
from megarl.config.megatron import megatron_options  # noqa: E402
from megarl.rollout import engine_configuration  # noqa: E402
from megarl.rollout.vllm.arguments import make_engine_config  # noqa: E402
from megatron_ext import compat  # noqa: E402
from megatron_ext.log_probs import linear_log_probs  # noqa: E402

TOKENS, WIDTH, EXPERTS, CHOSEN, VOCABULARY = 500, 128, 64, 8, 300


def random_layer(outputs):
    generator = torch.Generator().manual_seed(outputs)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    return hidden, (0.3 * torch.randn(outputs, WIDTH, generator=generator)).bfloat16()


def router_logits(hidden, weight):
    """Logits of vLLM's router on a CPU, as vLLM leaves it and as it is in an engine of ours."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from megarl.rollout.vllm import cpu, routers

    def say():
        with engine_modules(None):
            gate = GateLinear(WIDTH, EXPERTS, params_dtype=torch.bfloat16, prefix="gate")
        gate.weight.data.copy_(weight)
        cpu.corrections.keep_linear_weights()
        gate.quant_method.process_weights_after_loading(gate)
        return gate(hidden)[0].float()

    original = GateLinear.__init__, GateLinear.forward
    as_vllm_does = say()
    routers.keep_logits_in_float32()
    cpu.corrections.multiply_routers_in_float32()
    as_we_do = say()
    GateLinear.__init__, GateLinear.forward = original
    return as_vllm_does, as_we_do


def head_logits(folder, hidden, weight, engine_args):
    """Logits that vLLM makes of hidden states with these arguments."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from megarl.rollout.vllm import cpu

    cpu.corrections.keep_linear_weights()
    with engine_modules(make_engine_config(folder, {"dtype": "bfloat16", **engine_args})):
        head = ParallelLMHead(VOCABULARY, WIDTH, params_dtype=torch.bfloat16)
        head.weight.data[:VOCABULARY].copy_(weight)
        head.quant_method.process_weights_after_loading(head)
        return LogitsProcessor(VOCABULARY)._apply_head(head, hidden, None)[:, :VOCABULARY].float()


def hf_router_dtype(folder):
    return make_engine_config(folder, {}).model_config.hf_config.moe_router_dtype


def engine_modules(config):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
            parallel_state.initialize_model_parallel()
    return set_current_vllm_config(config or VllmConfig())


def test_no_token_goes_to_other_experts_than_in_the_trainer(vllm_process):
    compat.install()
    hidden, weight = random_layer(EXPERTS)

    def experts(logits):
        return logits.topk(CHOSEN).indices.sort().values

    trainer = experts(router_gating_linear(hidden, weight, None, torch.float32))
    as_vllm_does, as_we_do = (experts(each) for each in vllm_process(router_logits, hidden, weight))
    differing = [int((engine != trainer).any(1).sum()) for engine in (as_vllm_does, as_we_do)]
    assert differing[0] > TOKENS / 100, "there would be nothing to put right"
    assert differing[1] == 0


def test_the_router_of_deepseek_is_told_by_its_configuration(vllm_process, model_folder):
    assert vllm_process(hf_router_dtype, model_folder("deepseek_v3", 0)) == "float32"


@pytest.mark.parametrize("wanted", [False, True])
def test_logits_are_exact_on_both_sides_where_wanted(vllm_process, model_folder, wanted):
    config = compose(
        "quickstart", ["model.path=unused", "output_dir=unused", f"model.fp32_logits={str(wanted).lower()}"]
    )
    hidden, weight = random_layer(VOCABULARY)
    labels = torch.arange(TOKENS) % VOCABULARY
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[torch.arange(TOKENS), labels]
    fp32_logits = megatron_options(config).fp32_logits
    trainer = linear_log_probs(hidden, weight, labels, None, fp32_logits=fp32_logits).log_probs

    arguments = engine_configuration(config).engine_args.get("hf_overrides", {})
    logits = vllm_process(head_logits, model_folder("qwen3", 0), hidden, weight, {"hf_overrides": arguments})
    engine = logits.log_softmax(-1)[torch.arange(TOKENS), labels]
    for side in (trainer, engine):
        worst = float((side - exact).abs().max())
        assert worst < 1e-4 if wanted else worst > 1e-3
