"""SGLang's arguments, its version and where it is installed: what is refused, and what the server is given."""

import json

import pytest

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from converters.number_formats import FP8_BLOCK, INT8_CHANNEL
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.kind import QUANTISATION, quantisation
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.sglang.arguments import (
    check_block_fp8,
    check_int8,
    check_names,
    check_version,
    server_arguments,
)
from megarl.rollout.sglang.kind import LARGEST_GRAPH, OVERRIDES, SGLANG, VERSIONS
from megarl.rollout.sglang.samples import Limits, question
from megatron_ext import device


def test_a_broken_config_is_told_of_in_one_sentence(tmp_path):
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(UserError, match=rf"{CONFIG} is not JSON .*; copy it again"):
        server_arguments(tmp_path, {}, 1, "key")


def test_another_version_and_another_name_are_told_in_one_sentence():
    check_version(VERSIONS[0])
    with pytest.raises(UserError, match=r"SGLang 0\.4\.0 is installed, .* knows 0\.5\.23 alone"):
        check_version("0.4.0")
    with pytest.raises(UserError, match=r"tp_sise: .*did you mean rollout\.engine_args\.tp_size"):
        check_names(["tp_sise"], ["tp_size", "ep_size"])


def test_block_fp8_is_refused_where_it_would_be_packed(folders, monkeypatch):
    arguments = {"model_path": str(folders[0])}
    held = quantisation(FP8_BLOCK, read_architecture(read_json(folders[0] / CONFIG)))
    in_fp8 = {**arguments, OVERRIDES: json.dumps({QUANTISATION: held})}
    check_block_fp8(in_fp8)
    monkeypatch.setattr(device, "gpus", lambda: 1)
    for has_e4m3, given in ((True, in_fp8), (False, arguments)):
        monkeypatch.setattr(device, "has_e4m3", lambda _where, has_e4m3=has_e4m3: has_e4m3)
        check_block_fp8(given)
    with pytest.raises(UserError, match=r"below compute capability 8\.9, .* set rollout\.weights=as_trained"):
        check_block_fp8(in_fp8)


def test_int8_is_refused_on_gpus_without_a_kernel(folders, monkeypatch):
    architecture = read_architecture(read_json(folders[0] / CONFIG))
    as_trained = {"model_path": str(folders[0])}
    in_int8 = SGLANG.quantised(as_trained, INT8_CHANNEL, architecture)
    check_int8(in_int8)
    for capability, arguments in (((8, 0), in_int8), ((9, 0), in_int8), ((10, 0), as_trained)):
        monkeypatch.setattr(device, "compute_capability", lambda capability=capability: capability)
        check_int8(arguments)
    with pytest.raises(UserError, match=r"up to compute capability 9\.0 alone: set rollout\.weights=fp8_block"):
        check_int8(in_int8)


def test_what_megarl_sets_cannot_be_given(folders):
    with pytest.raises(UserError, match="skip_tokenizer_init=False is not supported: it is set by megarl"):
        server_arguments(folders[0], {"skip_tokenizer_init": False}, 1, "key")
    refused = {"speculative_algorithm": "EAGLE", "dp_size": 2, "kv_cache_dtype": "fp8_e5m2", "schedule_policy": "lpm"}
    refused["max_queued_requests"] = 4
    refused["moe_runner_backend"] = "hpc_ops"
    refused["moe_a2a_backend"] = "megamoe"
    for name, value in refused.items():
        with pytest.raises(UserError, match=name):
            SGLANG.check({name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"preferred_sampling_params": '{"repetition_penalty": 1.3}'},
        {"enable_watermark": True},
        {"watermark_default_enabled": True},
        {"watermark_enforce_all": True},
        {"watermark_config": "marks.json"},
        {"watermark_key": "key"},
        {"watermark_key_b": "key"},
        {"enable_strict_thinking": True},
        {"dllm_algorithm": "LowConfidence"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_would_sample_from_another_distribution_is_refused(folders, given):
    with pytest.raises(UserError, match=f"{next(iter(given))}=.* it changes the distribution that is sampled from"):
        server_arguments(folders[0], given, 1, "key")


def test_what_is_switched_off_is_not_refused(folders):
    given = {"enable_watermark": False, "preferred_sampling_params": None, "weight_cache_mode": "off"}
    given |= {"dcp_size": 2, "ep_dispatch_algorithm": "dynamic", "dcp_replicate_q_proj": False, "dwdp_size": 1}
    assert given.items() <= server_arguments(folders[0], given, 1, "key").items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_nvidia_megakernel", True),
        ("enable_amd_monokernel", True),
        ("enable_paged_experts", True),
        ("dcp_replicate_q_proj", True),
        ("enable_cp_decode_attn_tp", True),
        ("dwdp_size", 2),
        ("weight_cache_mode", "daemon"),
        ("weight_cache_mode", "client"),
    ],
)
def test_what_no_refit_reaches_is_refused(folders, name, value):
    with pytest.raises(UserError, match=rf"{name}={value} is not supported: .*(keep the old ones|change them, too)"):
        server_arguments(folders[0], {name: value}, 1, "key")


def test_a_request_leaves_nothing_of_its_distribution_to_the_defaults_of_a_server():
    (sample,) = question(Request([5], SamplingParameters()), Limits(512, 64), interval=64)["sampling_params"]
    sent = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens", "ignore_eos", "watermark")
    assert [sample[name] for name in sent] == [1.0, 1.0, -1, 0.0, 1.0, 0, False, {"enabled": False}]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"modelopt_quant": "fp8"}, "another model than is trained"),
        ({"modelopt_checkpoint_restore_path": "quantised.pt"}, "another model than is trained"),
        ({"quantize_and_serve": True}, "another model than is trained"),
        ({"rl_quant_profile": "profile.pt"}, "another model than is trained"),
        ({"kt_weight_path": "experts"}, "another model than is trained"),
        ({"enable_w4a4_mxfp4_megamoe": True}, "another model than is trained"),
        ({"forward_hooks": [{"name": "scale"}]}, "another model than is trained"),
        ({"ep_dispatch_algorithm": "fake"}, "another model than is trained, .*; use static or dynamic or lp"),
        ({"load_format": "flash_rl"}, "in another form; use auto or safetensors"),
        ({"load_format": "bitsandbytes"}, "in another form"),
        ({"model_config_parser": "mistral"}, "trainer follows config.json"),
        ({"decrypted_config_file": "other.json"}, "trainer follows config.json"),
        ({"quantization_param_path": "scales.json"}, "stay as they are while weights change"),
        ({"enable_unified_cache_external_linker": True}, "outlive the weights"),
        ({"radix_cache_backend": "flexkv"}, "outlive the weights"),
        ({"enable_flexkv": True}, "outlive the weights"),
        ({"enable_hierarchical_cache": True}, "an engine that is paused does not look whether they have arrived"),
        ({"enable_pdmux": True}, "goes on sampling while weights change"),
        ({"elastic_ep_backend": "mooncake"}, "experts would move"),
        ({"attn_dp_size": 2}, "one group of tensor-parallel workers"),
        ({"delete_ckpt_after_loading": True}, "the model's folder"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_another_model_and_what_stays_from_older_weights_is_refused(folders, given, says):
    with pytest.raises(UserError, match=rf"{next(iter(given))}=.* is not supported: .*{says}"):
        server_arguments(folders[0], given, 1, "key")


@pytest.mark.parametrize(
    ("name", "refused", "says", "taken"),
    [
        ("moe_a2a_backend", "mooncake", "recorded with experts of others; use none or deepep or deepep_v2", "deepep"),
        ("moe_a2a_backend", "flashinfer_megamoe", "recorded with experts of others", None),
        ("enable_prefill_cp", True, "recorded with experts of others; leave it out", False),
        ("enable_two_batch_overlap", True, "recorded over those of the other", False),
        ("chunked_prefill_size", -1, "dies when it computes more at a time; use 1 or more", 2048),
        ("chunked_prefill_size", 0, "dies when it computes more at a time", None),
        ("enable_mis", True, "in one piece, and the server", False),
        ("moe_runner_backend", "triton_kernel", "within a kernel, and none are recorded; use auto", "triton"),
        ("moe_runner_backend", "flashinfer_mxfp4", "within a kernel", "flashinfer_trtllm"),
    ],
)
def test_what_returns_no_experts_or_those_of_others_is_refused_where_they_are_asked_for(
    folders, name, refused, says, taken
):
    asked = SGLANG.returning_experts
    with pytest.raises(UserError, match=rf"{name}={refused} is not supported with algorithm\.router_replay=.*{says}"):
        server_arguments(folders[0], {**asked, name: refused}, 1, "key")
    for given in ({name: refused}, {**asked, name: taken}, {name: refused, **dict.fromkeys(asked, False)}):
        assert given.items() <= server_arguments(folders[0], given, 1, "key").items()


@pytest.mark.parametrize(
    ("given", "largest"),
    [
        ({}, 512),
        ({"max_running_requests": 96}, 96),
        ({"disable_cuda_graph": False, "cuda_graph_backend_decode": "full"}, 512),
        ({"cuda_graph_max_bs_decode": 64}, 64),
        ({"cuda_graph_bs_decode": [1, 8]}, None),
        ({"disable_cuda_graph": True}, None),
        ({"disable_decode_cuda_graph": True}, None),
        ({"cuda_graph_backend_decode": "disabled"}, None),
        # SGLang chooses both.
        ({"max_running_requests": None}, None),
    ],
)
def test_all_that_a_gpu_computes_at_once_has_a_graph(folders, monkeypatch, given, largest):
    assert LARGEST_GRAPH not in server_arguments(folders[0], {}, 1, "key")
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    started = server_arguments(folders[0], given, 1, "key")
    assert started.get(LARGEST_GRAPH) == largest
    assert {name: started[name] for name in given} == given


def test_readers_of_the_same_files_may_be_chosen(folders):
    for reader in (None, "auto", "safetensors", "fastsafetensors", "runai_streamer", "dummy"):
        assert server_arguments(folders[0], {"load_format": reader}, 1, "key")["load_format"] == reader


def test_what_contradicts_a_number_format_is_refused_beside_it(folders):
    architecture = read_architecture(read_json(folders[0] / CONFIG))
    for name, value in {"load_format": "runai_streamer", "model_impl": "transformers"}.items():
        SGLANG.check({name: value})
        with pytest.raises(UserError, match=rf"{name}={value} is not supported with rollout\.weights=fp8_block"):
            SGLANG.quantised({name: value}, FP8_BLOCK, architecture)


def test_what_an_engine_on_a_gpu_is_asked_for_has_a_bound_that_its_server_has_too(folders, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for given in ({}, {"max_running_requests": 2048}):
        started = server_arguments(folders[0], given, 1, "key")
        assert started["max_running_requests"] == SGLANG.max_concurrent_samples(given) is not None


@pytest.mark.parametrize(("field", "value"), [("mlp_only_layers", [0]), ("decoder_sparse_step", 2)])
def test_dense_layers_between_experts_are_refused(tmp_path, field, value):
    """SGLang builds experts in their place, finds no weights for them, and skips those of the dense ones in silence."""
    folder = write_tiny_model("qwen3_moe", tmp_path, fields={field: value})
    with pytest.raises(UserError, match=rf"has dense ones \({field}=.*set another rollout\.engine"):
        server_arguments(folder, {}, 1, "key")


@pytest.mark.parametrize("layers", [2, 3])
def test_sliding_layers_where_sglang_has_others_are_refused(tmp_path, layers):
    """SGLang goes by the number of a layer, and never reads the list."""
    turns = [["sliding_attention", "full_attention"][each % 2] for each in range(layers)]
    for types in (None, turns, [*turns[:-1], turns[-2]], turns[::-1][:1] * layers):
        folder = write_tiny_model("gemma2", tmp_path, fields={"num_hidden_layers": layers, "layer_types": types})
        if types in (None, turns):
            server_arguments(folder, {}, 1, "key")
            continue
        with pytest.raises(
            UserError, match=r"in turns, .* layer_types of config\.json .*: set another rollout\.engine"
        ):
            server_arguments(folder, {}, 1, "key")


def test_fields_that_transformers_leaves_out_and_sglang_reads_are_named(tmp_path):
    """Without, its workers end with an AttributeError of theirs."""
    folder = write_tiny_model("deepseek_v3", tmp_path)
    server_arguments(folder, {}, 1, "key")
    config = json.loads((folder / "config.json").read_text())
    del config["moe_layer_freq"], config["topk_method"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r'lacks.*: add "moe_layer_freq": 1, "topk_method": "noaux_tc" there'):
        server_arguments(folder, {}, 1, "key")
    config |= {"model_type": "deepseek_v2", "moe_layer_freq": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r'a deepseek_v2.*: add "topk_method": "greedy" there'):
        server_arguments(folder, {}, 1, "key")
    (folder / "config.json").write_text(json.dumps(config | {"topk_method": "greedy"}))
    with pytest.raises(UserError, match=r"takes a number for moe_layer_freq"):
        server_arguments(folder, {}, 1, "key")


def test_the_server_is_told_to_serve_the_oldest_draw_first(folders):
    """As `SchedulePolicy.calc_priority` of SGLang reads it: by sign x priority, and the sign is -1 by itself."""
    arguments = server_arguments(folders[0], {}, 1, "key")
    assert arguments["enable_priority_scheduling"] is True
    assert arguments["schedule_low_priority_values_first"] is True
    with pytest.raises(
        UserError, match="schedule_low_priority_values_first=False is not supported: it is set by megarl"
    ):
        server_arguments(folders[0], {"schedule_low_priority_values_first": False}, 1, "key")
    limits = Limits(512, 64)
    asked = question(Request([5], SamplingParameters(samples=2), priority=4096), limits, interval=64)
    assert asked["priority"] == 4096
