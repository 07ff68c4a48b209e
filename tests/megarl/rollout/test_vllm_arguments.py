import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from converters.errors import UserError
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.vllm.arguments import make_engine_config
from megarl.rollout.vllm.kind import VLLM
from megarl.rollout.vllm.sequences import finish_reason
from megarl.schema import ClusterConfig


def _config(folder, given):
    config = make_engine_config(folder, given)
    return config.model_config.dtype, config.scheduler_config.max_num_seqs, config.model_config.skip_tokenizer_init


@pytest.mark.parametrize(("characters", "has_own"), [(30, True), (60, False)])
def test_paths_of_sockets_fit_also_below_a_long_tmpdir(characters, has_own):
    program = (
        "import os; from megarl.rollout.vllm.arguments import prepare_environment; prepare_environment();"
        " print(os.environ.get('VLLM_RPC_BASE_PATH', ''))"
    )
    with TemporaryDirectory(prefix="x" * (characters - len("/tmp/12345678")), dir="/tmp") as tmpdir:
        environment = {**os.environ, "TMPDIR": tmpdir}
        environment.pop("VLLM_RPC_BASE_PATH", None)
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        )
        assert list(Path(tmpdir).iterdir()) == []
    assert run.stdout.strip().startswith(tmpdir) == has_own


@pytest.mark.parametrize(("backend", "given", "runner"), [("nccl", "0", "1"), ("gloo", "1", "0")])
def test_the_rest_of_a_response_has_random_numbers_of_its_own_whatever_runner_is_asked_for(backend, given, runner):
    program = (
        "import os; from megatron_ext import device; from megarl.rollout.vllm.arguments import prepare_environment;"
        f" device.backend = lambda: {backend!r}; prepare_environment(); print(os.environ['VLLM_USE_V2_MODEL_RUNNER'])"
    )
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": given}
    run = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == runner


def _ready_timeout_s():
    from vllm.v1.engine import core_client

    return core_client.VLLM_ENGINE_READY_TIMEOUT_S


def test_ranks_may_take_as_long_to_start_as_the_run_lets_them(vllm_process):
    assert vllm_process(_ready_timeout_s) > 100 * ClusterConfig.engine_start_timeout_s


def _reasons():
    from vllm.v1.engine import FINISH_REASON_STRINGS

    return FINISH_REASON_STRINGS


def test_every_reason_of_vllm_for_which_a_response_ends_is_known(vllm_process):
    ended = {name: finish_reason(name) for name in vllm_process(_reasons) if name != "error"}
    assert ended == {"stop": "stop", "length": "length", "abort": "abort", "repetition": "length"}
    with pytest.raises(RuntimeError, match="vLLM ended a response with error: the end of the engine's log says why"):
        finish_reason("error")


def test_the_models_own_dtype_is_the_default(vllm_process, model_folder):
    folder = model_folder("qwen3", 0)
    assert vllm_process(_config, folder, {}) == (torch.float32, 512, True)
    assert vllm_process(_config, folder, {"dtype": "bfloat16", "max_num_seqs": 7}) == (
        torch.bfloat16,
        7,
        True,
    )


def _skips_experts_of_others(folder, given):
    return make_engine_config(folder, given).parallel_config.enable_ep_weight_filter


@pytest.mark.parametrize(
    ("given", "skips"),
    [
        ({}, False),
        ({"enable_expert_parallel": True}, True),
        ({"enable_expert_parallel": True, "enable_ep_weight_filter": False}, False),
    ],
)
def test_a_worker_reads_no_experts_that_others_have(vllm_process, model_folder, given, skips):
    assert vllm_process(_skips_experts_of_others, model_folder("qwen3_moe", 0), given) == skips


def _kernels(folder, given):
    config = make_engine_config(folder, given)
    return config.kernel_config.moe_backend, config.kernel_config.linear_backend, config.model_config.enable_sleep_mode


def test_what_engines_on_gpus_alone_have_is_left_out_on_a_cpu(vllm_process, model_folder):
    given = {"moe_backend": "triton", "linear_backend": "cutlass", "enable_sleep_mode": True}
    assert vllm_process(_kernels, model_folder("qwen3", 0), given) == ("auto", "auto", False)


def _backends(folder, given):
    config = make_engine_config(folder, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, **given})
    return config.attention_config.backend.name, config.speculative_config.attention_backend.name


@pytest.mark.parametrize(("given", "backend"), [({}, "CPU_MLA"), ({"attention_backend": "AMX_MLA"}, "AMX_MLA")])
def test_a_draft_has_the_backend_of_the_policy_on_a_cpu(vllm_process, tmp_path, given, backend):
    folder = write_tiny_model("deepseek_v3", tmp_path, fields={"num_nextn_predict_layers": 1})
    assert vllm_process(_backends, folder, given) == (backend, backend)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 2}, r"engine_args\.tensor_parallel: .* did you mean .*\.tensor_parallel_size"),
        # An argument of the class for servers alone.
        ({"enable_log_requests": True}, r"engine_args\.enable_log_requests: the installed vLLM has no such option"),
        (
            {"logprobs_mode": "raw_logprobs"},
            r"engine_args\.logprobs_mode=raw_logprobs is not supported: it is set by megarl",
        ),
        ({"max_num_batched_tokens": 1}, r"vLLM refuses rollout\.engine_args=.*max_num_batched_tokens"),
        (
            {"enable_return_routed_experts": True, "pipeline_parallel_size": 2},
            r"pipeline_parallel_size=2 is not supported with algorithm\.router_replay=rollout: .* stage .*; use 1",
        ),
        ({"dtype": "float13"}, r"engine_args\.dtype=float13 cannot be: it takes .*; did you mean float32"),
    ],
)
def test_arguments_that_do_not_exist_or_are_refused(vllm_process, model_folder, given, message):
    with pytest.raises(UserError, match=message):
        vllm_process(make_engine_config, model_folder("qwen3", 0), given)


def _names_and_batches(folder):
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    ours = make_engine_config(folder, {}).scheduler_config.max_num_batched_tokens
    offline, _ = EngineArgs.get_batch_defaults(1)
    return {field.name for field in fields(EngineArgs)}, ours, offline[UsageContext.LLM_CLASS]


def test_what_is_checked_early_is_what_the_engine_is_made_from(vllm_process, model_folder):
    names, batched_tokens, offline = vllm_process(_names_and_batches, model_folder("qwen3", 0))
    assert set(VLLM.arguments()) == names
    assert batched_tokens == offline


def _keys_of_compiled_graphs(folder):
    config = make_engine_config(folder, {"additional_config": {"mine": 1}})
    given, ours = dict(config.additional_config), config.compute_hash()
    del config.additional_config["megarl_routers"]
    return given, ours, config.compute_hash()


def test_graphs_that_vllm_compiled_by_itself_are_not_taken_for_ours(vllm_process, model_folder):
    given, ours, plain = vllm_process(_keys_of_compiled_graphs, model_folder("qwen3_moe", 0))
    assert given["mine"] == 1
    assert ours != plain


def _attention(folder, given, capability=None):
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    played = None if capability is None else DeviceCapability(*capability)
    with patch.object(type(current_platform), "get_device_capability", return_value=played):
        backend = make_engine_config(folder, given).attention_config.backend
    return backend and backend.name


@pytest.mark.parametrize(
    ("capability", "given", "backend"),
    [
        (None, {}, None),
        ((8, 0), {}, None),
        ((9, 0), {}, None),
        ((10, 0), {}, "TRITON_ATTN"),
        ((12, 0), {"attention_backend": "auto"}, "TRITON_ATTN"),
        ((10, 3), {"attention_config": {"use_trtllm_attention": True}}, "TRITON_ATTN"),
        ((10, 0), {"attention_backend": "flash_attn"}, "FLASH_ATTN"),
        ((10, 0), {"attention_config": {"backend": "FLASH_ATTN"}}, "FLASH_ATTN"),
    ],
)
def test_a_model_with_soft_caps_has_attention_that_caps(vllm_process, model_folder, capability, given, backend):
    assert vllm_process(_attention, model_folder("gemma2", 0), given, capability) == backend


def test_a_model_without_soft_caps_has_any_attention(vllm_process, model_folder):
    for given, backend in (({}, None), ({"attention_backend": "FLASHINFER"}, "FLASHINFER")):
        assert vllm_process(_attention, model_folder("qwen3", 0), given, (10, 0)) == backend


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"attention_backend": "FLASHINFER"}, "attention_backend=FLASHINFER"),
        ({"attention_backend": "turboquant"}, "attention_backend=TURBOQUANT"),
        ({"attention_config": {"backend": "FlashInfer"}}, "attention_config.backend=FLASHINFER"),
        (
            {"attention_config": {"backend_per_kind": {"sliding_window": "FLASHINFER"}}},
            "attention_config.backend_per_kind.sliding_window=FLASHINFER",
        ),
    ],
)
def test_attention_that_leaves_out_a_soft_cap_is_refused(vllm_process, model_folder, given, named):
    with pytest.raises(
        UserError, match=rf"engine_args\.{named} is not supported with a model .*; use FLASH_ATTN or TRITON_ATTN$"
    ):
        vllm_process(_attention, model_folder("gemma2", 0), given)
