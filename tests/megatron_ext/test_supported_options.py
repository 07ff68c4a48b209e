"""Options that work are tested, options that do not are refused, and what config.json says is not chosen twice."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from given_options import given_options
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from small_configs import make_config

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.models.policy import check_layout
from megatron_ext.model.model import transformer_config
from megatron_ext.options.arguments import CLASSES, megatron_fields
from megatron_ext.options.model_fields import LATENT_ATTENTION_FIELDS, MODEL_CHOICES, MODEL_FIELDS, without_model_fields
from megatron_ext.options.options import MegatronOptions
from megatron_ext.options.supported_options import NEEDS, REFUSED, REFUSED_IN_SOME_VERSIONS, TESTED, check_supported

PART_ON_HOST = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "use_precision_aware_optimizer": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
TESTS = Path(__file__).resolve().parents[1]


def megatrons_default(name: str) -> Any:
    for module, class_name in CLASSES.values():
        for field in dataclasses.fields(getattr(importlib.import_module(module), class_name)):
            if field.name == name and field.default is not dataclasses.MISSING:
                return "fp32" if field.default is torch.float32 else field.default
    return None


def test_the_tables_name_options_of_the_installed_megatron_each_in_one_of_them() -> None:
    tables = [*REFUSED, *TESTED, *MODEL_FIELDS, *LATENT_ATTENTION_FIELDS]
    unknown = (set(tables) | set(MODEL_CHOICES) | set(NEEDS)) - set(megatron_fields())
    assert unknown <= set(REFUSED_IN_SOME_VERSIONS)
    assert len(set(tables)) == len(tables)


def test_megatrons_defaults_are_not_refused_and_are_what_models_have_that_say_nothing() -> None:
    check_supported({name: megatrons_default(name) for name in REFUSED if name != "moe_router_load_balancing_type"})
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    assert {name: defaults[name] for name in MODEL_FIELDS} == MODEL_FIELDS


@pytest.mark.parametrize("name", list(TESTED))
def test_a_tested_option_is_given_in_its_test(name: str) -> None:
    assert name in given_options((TESTS / TESTED[name]).read_text())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp_comm_overlap": True}, "tp_comm_overlap=True is not supported: .*; leave it out"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
            "fine_grained_activation_offloading=True is not supported: .* without a gradient .*; leave it out",
        ),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
            "moe_flex_dispatcher_backend=hybridep is not supported: .*=alltoall take any number; use deepep",
        ),
        (
            {"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": False},
            "moe_flex_dispatcher_backend=hybridep",
        ),
        (
            {"moe_flex_dispatcher_backend": "ncclep", "moe_hybridep_pad_uneven_dispatch_inputs": True},
            "moe_flex_dispatcher_backend=ncclep",
        ),
        (
            {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": True},
            "overlap_p2p_comm_warmup_flush=True is not supported: .* received ahead.*; leave it out",
        ),
        ({"cp_comm_type": "all_gather"}, "cp_comm_type=all_gather is not supported: .*packed.*; use p2p or a2a"),
        ({"cp_comm_type": ["p2p", "a2a+p2p"]}, r"cp_comm_type=\['p2p', 'a2a\+p2p'\] is not supported"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl=local .*one shape.*; use none"),
        ({"num_distributed_optimizer_instances": 2}, "; use 1"),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, "over a micro-batch"),
        ({"data_parallel_sharding_strategy": "optim"}, "asks for a CUDA device .* use no_shard"),
        ({"overlap_param_gather": True}, "overlap_param_gather works only with megatron.overlap_grad_reduce=true"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": False},
            "works only with megatron.use_distributed_optimizer",
        ),
        ({"optimizer": "sgd"}, "optimizer=sgd works only with megatron.use_distributed_optimizer=false"),
        (
            {"pipeline_model_parallel_size": 4, "microbatch_group_size_per_vp_stage": 2},
            "microbatch_group_size_per_vp_stage=2 must be at least megatron.pipeline_model_parallel_size=4",
        ),
        ({"recompute_granularity": "full"}, "recompute_granularity=full needs megatron.recompute_method: set it, too"),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            "recompute_granularity=full needs megatron.recompute_num_layers: set it, too, for instance to 1",
        ),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 2},
            "recompute_num_layers=2 is for megatron.recompute_granularity=full, .*: leave it out",
        ),
        ({"fp8": "hybrid", "fp8_dot_product_attention": True}, "fp8_dot_product_attention=True .*; leave it out"),
        ({"fp8": "hybrid", "fp8_multi_head_attention": True}, "fp8_multi_head_attention=True .*; leave it out"),
        ({"fused_single_qkv_rope": True}, "fused_single_qkv_rope=True .* packed sequences; leave it out"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection=True .*; leave it out"),
        (
            {"pipeline_model_parallel_size": 2, "num_microbatches_with_partial_activation_checkpoints": 1},
            "num_microbatches_with_partial_activation_checkpoints=1 .*; leave it out",
        ),
        ({"attention_backend": "flash", "batch_invariant_mode": True}, "batch_invariant_mode=True .*; leave it out"),
        (
            {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"},
            "main_grads_dtype=bf16 .* grad_reduce_in_fp32 says; use fp32",
        ),
        (
            {"optimizer_cpu_offload": True, "use_torch_optimizer_for_cpu_offload": True},
            "use_torch_optimizer_for_cpu_offload=True .* the same optimizers .*; leave it out",
        ),
        *(
            (
                {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, name: dtype},
                f"{name}={dtype} is not supported with megatron.optimizer_cpu_offload=true: .* no types.*; use fp32",
            )
            for name, dtype in (("exp_avg_dtype", "bf16"), ("exp_avg_sq_dtype", "fp16"), ("main_params_dtype", "fp16"))
        ),
        (
            {"optimizer_cpu_offload": True, "pin_cpu_params": False},
            "pin_cpu_params=False .* changes nothing.*; use True",
        ),
        (
            {**PART_ON_HOST, "grad_reduce_in_fp32": False},
            "overlap_cpu_optimizer_d2h_h2d=True is not supported with megatron.optimizer_offload_fraction=0.5 and"
            " megatron.grad_reduce_in_fp32=false: .* wrong ones; .*; leave it out",
        ),
        ({"pipeline_model_parallel_comm_backend": "ucc"}, "pipeline_model_parallel_comm_backend=ucc .*; use nccl"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit=True .*; leave it out"),
        ({"log_num_zeros_in_grad": True}, "log_num_zeros_in_grad=True .*; leave it out"),
        *(
            (
                {"use_precision_aware_optimizer": True, name: eight_bits},
                f"{name}={eight_bits} is not supported: .*no numbers any more; use fp32 or bf16 or fp16",
            )
            for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
            for eight_bits in ("fp8", "uint8", torch.uint8)
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "exp_avg_dtype": "fp16"},
            "exp_avg_dtype=fp16 is not supported with megatron.fp8_recipe=tensorwise: .* use fp32 or bf16",
        ),
        (
            {"fp8_recipe": "mxfp8", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp32"},
            "exp_avg_sq_dtype=fp16 is not supported with megatron.fp8_recipe=mxfp8",
        ),
        (
            {"deterministic_mode": True, "attention_backend": AttnBackend.flash},
            "attention_backend=flash is not supported with megatron.deterministic_mode=true: .* use auto or fused",
        ),
        (
            {"deterministic_mode": True, "cross_entropy_loss_fusion": True},
            "cross_entropy_loss_fusion=True is not supported with megatron.deterministic_mode=true: .*; leave it out",
        ),
        ({"attention_backend": "local"}, "attention_backend=local .* megatron.transformer_impl=local: set it too"),
        ({"attention_backend": AttnBackend.local}, "attention_backend=local .* megatron.transformer_impl=local"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_supported(options)


def test_switched_off_is_not_refused() -> None:
    check_supported({"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None})
    check_supported({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1})
    check_supported({"recompute_granularity": "selective"})
    check_supported({"tp_comm_overlap": False, "moe_aux_loss_coeff": [0.0, 0.0], "fp8_param": None})
    check_supported({"optimizer": "sgd", "use_distributed_optimizer": False, "optimizer_cpu_offload": False})
    check_supported({"overlap_param_gather": True, "overlap_grad_reduce": True, "align_param_gather": True})
    for working in (
        {"fp8_recipe": "delayed"},
        {"fp8_recipe": None},
        {"fp8_recipe": "blockwise", "main_params_dtype": "fp16"},
    ):
        check_supported({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16", **working})
    check_supported({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp32", "fp8_recipe": "blockwise"})
    check_supported({"exp_avg_dtype": "bf16", "optimizer_cpu_offload": False, "pin_cpu_params": True})
    check_supported({"exp_avg_dtype": "fp32", "main_params_dtype": "fp32", "optimizer_cpu_offload": True})
    for working in (
        {"optimizer_offload_fraction": 1.0},
        {"use_precision_aware_optimizer": False},
        {"overlap_cpu_optimizer_d2h_h2d": False},
        {"grad_reduce_in_fp32": True},
        {"optimizer_cpu_offload": False},
    ):
        check_supported({**PART_ON_HOST, "grad_reduce_in_fp32": False, **working})
    check_supported(PART_ON_HOST)
    check_supported({"attention_backend": "local", "transformer_impl": "local"})
    check_supported({"deterministic_mode": True, "attention_backend": AttnBackend.fused})
    check_supported({"deterministic_mode": False, "attention_backend": "flash", "cross_entropy_loss_fusion": True})
    check_supported({"cp_comm_type": "p2p"})
    check_supported({"cp_comm_type": ["p2p", "a2a"]})
    check_supported({"moe_flex_dispatcher_backend": "deepep"})
    check_supported({"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": True})
    check_supported({"attention_backend": "flash", "fp8": "hybrid", "fp8_dot_product_attention": False})


def test_what_config_json_says_may_be_repeated_and_not_changed(tiny_models: Mapping[str, Path]) -> None:
    qwen3, deepseek = (
        read_architecture(HuggingFaceCheckpoint(tiny_models[name]).config) for name in ("qwen3_moe", "deepseek_v3")
    )
    said = {"rotary_base": qwen3.gpt_model["rotary_base"], "num_layers": 4, "qk_layernorm": True, "window_size": None}
    chosen = {"moe_token_dispatcher_type": "allgather", "recompute_granularity": "full"}
    assert without_model_fields(qwen3, {**said, **chosen}) == chosen
    for architecture, field, value in [
        (qwen3, "rotary_base", 5e5),
        (qwen3, "layernorm_epsilon", 1e-3),
        (qwen3, "moe_router_topk", 3),
        (qwen3, "moe_router_score_function", "sigmoid"),
        (qwen3, "kv_lora_rank", 512),
        (qwen3, "softmax_type", "off-by-one"),
        (deepseek, "rotary_scaling_factor", 40),
        (deepseek, "moe_router_group_topk", 2),
    ]:
        with pytest.raises(UserError, match=f"megatron.{field}={value} is not what config.json"):
            without_model_fields(architecture, {field: value})


@pytest.mark.parametrize("given", ["a2a", ["p2p", "a2a"]])
def test_latent_attention_is_not_exchanged_by_heads(tiny_models: Mapping[str, Path], given: str | list[str]) -> None:
    qwen3, deepseek = (
        read_architecture(HuggingFaceCheckpoint(tiny_models[name]).config) for name in ("qwen3_moe", "deepseek_v3")
    )
    assert without_model_fields(qwen3, {"cp_comm_type": given}) == {"cp_comm_type": given}
    assert without_model_fields(deepseek, {"cp_comm_type": "p2p"}) == {"cp_comm_type": "p2p"}
    with pytest.raises(UserError, match=r"cp_comm_type=.*a2a.* deepseek_v3 .*; use p2p"):
        without_model_fields(deepseek, {"cp_comm_type": given})


def test_every_field_that_an_architecture_sets_is_taken_from_it_alone(tiny_models: Mapping[str, Path]) -> None:
    for folder in tiny_models.values():
        architecture = read_architecture(HuggingFaceCheckpoint(folder).config)
        said = {name: value for name, value in architecture.transformer_config.items() if name not in MODEL_CHOICES}
        assert without_model_fields(architecture, said) == {}
        config = transformer_config(architecture, ParallelSizes(), params_dtype=torch.float32, overrides=said)
        assert config.num_layers == said["num_layers"]
        for name in said:
            with pytest.raises(UserError, match=f"megatron.{name}=another is not what config.json"):
                without_model_fields(architecture, {name: "another"})


def test_sizes_of_micro_batches_follow_from_the_stages_and_the_recipe() -> None:
    def options(sizes: dict[str, int], **transformer: Any) -> MegatronOptions:
        return MegatronOptions(ParallelSizes(world_size=8, **sizes), torch.bfloat16, transformer=transformer)

    stages = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    assert options({"pipeline_model_parallel_size": 4}).micro_batch_multiple == 1
    assert options(stages).micro_batch_multiple == 4
    assert options(stages, microbatch_group_size_per_vp_stage=6).micro_batch_multiple == 6
    assert options({"tensor_model_parallel_size": 4}).token_multiple == 4
    assert options({"tensor_model_parallel_size": 4}, fp8="e4m3").token_multiple == 64
    assert options({}, fp8="hybrid", fp8_recipe="mxfp8").token_multiple == 32
    assert options({"tensor_model_parallel_size": 4}, fp8="e4m3", fp8_recipe="blockwise").token_multiple == 512
    assert options({}, fp8=None, fp8_recipe="mxfp8").token_multiple == 1
    assert options({}, fp4="e2m1").token_multiple == 32


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("qwen3", {"hidden_size": 2880}, "hidden_size that is a multiple of 128, and that of this model is 2880:"),
        ("deepseek_v3", {"hidden_size": 256, "q_lora_rank": 96, "kv_lora_rank": 128}, "q_lora_rank .* is 96:"),
        ("deepseek_v3", {"hidden_size": 256, "q_lora_rank": None, "kv_lora_rank": 64}, "kv_lora_rank .* is 64:"),
    ],
)
def test_rows_that_are_no_whole_blocks_are_not_gathered(family: str, fields: dict[str, Any], says: str) -> None:
    def check(tensor: int, recipe: str, **others: int) -> None:
        sizes = ParallelSizes(world_size=2, tensor_model_parallel_size=tensor)
        given = MegatronOptions(sizes, torch.bfloat16, transformer={"fp8": "e4m3", "fp8_recipe": recipe})
        check_layout(read_architecture({**make_config(family), **fields, **others}), given)

    with pytest.raises(UserError, match=f"^megatron.fp8_recipe=blockwise with .* needs a {says}"):
        check(2, "blockwise")
    check(1, "blockwise")
    check(2, "tensorwise")
    check(2, "blockwise", **dict.fromkeys(fields, 128))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fp8": "e4m3", "fp8_recipe": "blokwise"}, "fp8_recipe=blokwise is none of .*; did you mean blockwise"),
        ({"fp4": "e2m1", "fp4_recipe": "fp3"}, "fp4_recipe=fp3 is none of"),
    ],
)
def test_a_recipe_that_there_is_not_is_refused_where_it_is_read(given, says):
    with pytest.raises(UserError, match=says):
        MegatronOptions(ParallelSizes(), torch.bfloat16, transformer=given)
