"""Tables of Megatron's options that are tested, and of those that are refused, each with a reason.

All other options are passed on, untested. Validation and the page about options use these tables.
"""

from collections.abc import Mapping
from typing import Any

from converters.errors import UserError
from megatron_ext.options.refusal import Refusal, refuse
from megatron_ext.routing.router_loss_options import RouterLosses

_PREFIX = "megatron."
FULLY_SHARDED = "use_torch_fsdp2"
"""Megatron-LM's option for torch's FSDP2, which wraps the model instead of Megatron's DDP."""
_GRANULARITY = "recompute_granularity"
_RECIPE, _DELAYED = "fp8_recipe", "delayed"
_DISPATCHER, _PADS = "moe_flex_dispatcher_backend", "moe_hybridep_pad_uneven_dispatch_inputs"
_GROUP, _STAGES = "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_size"

_CONTEXT = "all sequences are cut over the same context_parallel_size ranks"
_ONE_SHAPE = "a CUDA graph has one shape, and packed micro-batches differ in length"
_OTHER_SCHEDULE = "it belongs to Megatron's combined schedule, whose forward pass computes Megatron's own loss"
_WEIGHTS = "the weights must keep the type of model.dtype, in which checkpoints and refits read them"
_OTHER_PLACES = "its weights lie otherwise than checkpoints and refits know"
_OTHER_WRAPPER = (
    "Megatron-FSDP asks for a CUDA device by its number, so that none of it can be run without one, and where it cuts a"
    " weight follows from others in the same buffer, which refits, exports and checkpoints do not know; use_torch_fsdp2"
    " cuts weights, gradients and optimizer state over the ranks"
)
_LAYOUT = (
    "checkpoints and refits know layers that are dealt evenly, but for num_layers_in_first_pipeline_stage and"
    " num_layers_in_last_pipeline_stage"
)
_DROPS = "the trainer would drop tokens that the engine, which samples them, sends to their experts"
_RANDOM = "the trainer would route at random, and the engine, which samples, does not"
_EIGHT_BIT_ATTENTION = "no kernel of cuDNN or FlashAttention trains with packed sequences in FP8"
_EIGHT_BIT_MOMENTS = Refusal(
    "Transformer Engine multiplies moments in FP8 by one over the largest of them, and where all are zero, as those of"
    " an expert that got no token, they, and a step later the weights, are no numbers any more",
    (None, "fp32", "bf16", "fp16"),
)
_INFERENCE = "it belongs to Megatron's own inference; the engines sample here"

REFUSED_IN_SOME_VERSIONS: Mapping[str, Refusal] = {
    "moe_use_legacy_grouped_gemm": Refusal(_OTHER_PLACES),
    "tensor_parallel_num_weight_shards": Refusal(_OTHER_PLACES),
    "expert_tensor_parallel_num_weight_shards": Refusal(_OTHER_PLACES),
    "gtp_weight_remat_size": Refusal(_OTHER_PLACES, (None, 1)),
    "expert_gtp_weight_remat_size": Refusal(_OTHER_PLACES, (None, 1)),
    "mla_down_proj_fusion": Refusal(_OTHER_PLACES),
    "moe_single_grouped_weight": Refusal(_OTHER_PLACES),
    "moe_single_grouped_bias": Refusal(_OTHER_PLACES),
    "moe_mlp_glu_interleave_size": Refusal(_OTHER_PLACES),
    "moe_shared_expert_glu_interleave_size": Refusal(_OTHER_PLACES),
    "use_grouped_gemm_for_dense_mlp": Refusal(_OTHER_PLACES),
    "use_grouped_gemm_for_shared_expert": Refusal(_OTHER_PLACES),
    "use_transformer_engine_op_fuser": Refusal(_OTHER_PLACES),
    "mtp_use_repeated_layer": Refusal(_OTHER_PLACES),
    "moe_expert_rank_capacity_factor": Refusal(_DROPS),
    "moe_router_force_biased": Refusal(_RANDOM),
    "use_mup": Refusal("config.json says no such scaling, and the engines, which follow it, have none"),
    "fp8_output_proj": Refusal(
        "the output layer computes log-probs a part of the vocabulary at a time, in bf16 or fp32"
    ),
    "fp4_param_gather": Refusal(_WEIGHTS),
    "use_layer_wise_distributed_optimizer": Refusal(
        "only adam and sgd are made here, whose state is cut over all ranks"
    ),
}
"""Options that exist only in some of the supported versions of megatron-core."""

REFUSED: Mapping[str, Refusal] = {
    "hierarchical_context_parallel_sizes": Refusal(_CONTEXT),
    "hybrid_context_parallel": Refusal(_CONTEXT),
    "cp_comm_type": Refusal(
        "Transformer Engine takes packed sequences with no other, and multi-latent attention with p2p alone",
        (None, "p2p", "a2a"),
    ),
    "moe_router_load_balancing_type": Refusal(
        "the trainer would choose other experts than the engine, which samples",
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    ),
    "moe_router_force_load_balancing": Refusal(_RANDOM),
    "moe_input_jitter_eps": Refusal(_RANDOM, (None, 0)),
    "moe_expert_capacity_factor": Refusal(_DROPS),
    "moe_token_dropping": Refusal(_DROPS),
    "moe_pad_expert_input_to_capacity": Refusal(_DROPS),
    _DISPATCHER: Refusal(
        "all ranks must bring it the same number of tokens, and packed micro-batches differ: ranks would wait without"
        f" end, or tokens go to wrong experts (megatron-core 0.19 pads them for hybridep with {_PADS}=true);"
        " deepep and moe_token_dispatcher_type=alltoall take any number",
        (None, "deepep"),
    ),
    "moe_enable_routing_replay": Refusal(
        "nothing would be recorded or replayed by it alone; algorithm.router_replay=rollout replays what engines chose"
    ),
    "tp_comm_overlap": Refusal(
        "Transformer Engine's user buffers are made for one length, and packed micro-batches differ"
    ),
    "enable_cuda_graph": Refusal(_ONE_SHAPE),
    "external_cuda_graph": Refusal(_ONE_SHAPE),
    "cuda_graph_impl": Refusal(_ONE_SHAPE, (None, "none")),
    "overlap_p2p_comm_warmup_flush": Refusal(
        "stages tell each other the shape of a micro-batch before each send, so that nothing can be received ahead"
    ),
    "overlap_moe_expert_parallel_comm": Refusal(_OTHER_SCHEDULE),
    "delay_wgrad_compute": Refusal(_OTHER_SCHEDULE),
    "ep_overlap_early_attn_memory_release": Refusal(_OTHER_SCHEDULE),
    "fine_grained_activation_offloading": Refusal(
        "megatron-core takes the passes of a first step for those of all that follow, and here others without a"
        " gradient come between, and micro-batches differ in number and length; recompute_granularity saves memory, too"
    ),
    "defer_embedding_wgrad_compute": Refusal(
        "the output layer adds its gradient a part of the vocabulary at a time, and nothing of it is left to defer"
    ),
    "qk_clip": Refusal("Megatron's training script clips the weights after a step, which this loop does not"),
    "pipeline_model_parallel_layout": Refusal(_LAYOUT),
    "account_for_embedding_in_pipeline_split": Refusal(_LAYOUT),
    "account_for_loss_in_pipeline_split": Refusal(_LAYOUT),
    "hetereogenous_dist_checkpoint": Refusal("checkpoints name parameters as the model's layers say"),
    "fp8_param": Refusal(_WEIGHTS),
    "fp4_param": Refusal(_WEIGHTS),
    "fp8_param_gather": Refusal(_WEIGHTS),
    "reuse_grad_buf_for_mxfp8_param_ag": Refusal(_WEIGHTS),
    "num_distributed_optimizer_instances": Refusal(
        "parallel groups are made for one instance of the distributed optimizer", (None, 1)
    ),
    "overlap_param_gather_with_optimizer_step": Refusal(
        "refits, checkpoints and references read weights after the step; use overlap_param_gather"
    ),
    "average_in_collective": Refusal(
        "gradients are summed: the weights of the loss already hold the denominator of the global batch"
    ),
    "use_megatron_fsdp": Refusal(_OTHER_WRAPPER),
    "use_custom_fsdp": Refusal(_OTHER_WRAPPER),
    "data_parallel_sharding_strategy": Refusal(_OTHER_WRAPPER, (None, "no_shard")),
    "outer_dp_sharding_strategy": Refusal(_OTHER_WRAPPER, (None, "no_shard")),
    "optimizer": Refusal("only adam and sgd are made here", (None, "adam", "sgd")),
    "fp8_dot_product_attention": Refusal(_EIGHT_BIT_ATTENTION),
    "fp8_multi_head_attention": Refusal(_EIGHT_BIT_ATTENTION),
    "fused_single_qkv_rope": Refusal("its kernel takes no packed sequences"),
    "fp32_residual_connection": Refusal(
        "hidden states would be in fp32, and neither layers in bf16 nor the next pipeline stage take them"
    ),
    "num_microbatches_with_partial_activation_checkpoints": Refusal(
        "a forward pass would be told by micro-batch how much to compute again, and this loop's takes no such word",
        (None,),
    ),
    "batch_invariant_mode": Refusal(
        "Megatron's training script puts the kernels for it in place, which this loop does not"
    ),
    "main_grads_dtype": Refusal(
        "it changes nothing: gradients have the type that grad_reduce_in_fp32 says", (None, "fp32")
    ),
    "exp_avg_dtype": _EIGHT_BIT_MOMENTS,
    "exp_avg_sq_dtype": _EIGHT_BIT_MOMENTS,
    "use_torch_optimizer_for_cpu_offload": Refusal("megatron-core makes the same optimizers with it as without"),
    "pin_cpu_params": Refusal(
        "it changes nothing: megatron-core makes the same copies of parameters on the host with it as without",
        (None, True),
    ),
    "pipeline_model_parallel_comm_backend": Refusal(
        "pipeline stages send by the backend of all other groups", (None, "nccl")
    ),
    "log_max_attention_logit": Refusal("it is for qk_clip, keeps FlashAttention out, and nothing here logs it"),
    "log_num_zeros_in_grad": Refusal("zeros would be counted in each step, and nothing here logs their number"),
    "flash_decode": Refusal(_INFERENCE),
    "cache_mla_latents": Refusal(_INFERENCE),
    "use_inference_optimized_layers": Refusal(_INFERENCE),
    "inference_fuse_tp_communication": Refusal(_INFERENCE),
    "transformer_impl": Refusal(
        "models are made of Megatron's own modules or Transformer Engine's", (None, "local", "transformer_engine")
    ),
    **REFUSED_IN_SOME_VERSIONS,
}

_BUFFERS = "FSDP2 has no gradient buffers of Megatron's"
_BY_ITSELF = "FSDP2 gathers weights and reduces gradients layer by layer, beside the computation, by itself"
_EIGHT_BITS = "FSDP2 gathers weights in the type that they have, and recipes of 8 and 4 bits are not tested with it"

BESIDE_FSDP2: Mapping[str, Refusal] = {
    "use_distributed_optimizer": Refusal("FSDP2 cuts the optimizer's state over the ranks by itself"),
    "optimizer_cpu_offload": Refusal("it belongs to the distributed optimizer"),
    "use_precision_aware_optimizer": Refusal("it belongs to the distributed optimizer"),
    "gradient_accumulation_fusion": Refusal(_BUFFERS),
    "grad_reduce_in_fp32": Refusal("FSDP2 reduces gradients and adds them up in the type of the weights"),
    "overlap_grad_reduce": Refusal(_BY_ITSELF),
    "overlap_param_gather": Refusal(_BY_ITSELF),
    "align_param_gather": Refusal(_BY_ITSELF),
    "bucket_size": Refusal(_BUFFERS, (None,)),
    "fp8": Refusal(_EIGHT_BITS),
    "fp4": Refusal(_EIGHT_BITS),
}
"""Options that work, except with use_torch_fsdp2."""

ON_HOST = "optimizer_cpu_offload"
"""Megatron's option for an optimizer that updates all or some of its parameters in host memory."""
_FLOAT32_ON_HOST = Refusal(
    "megatron-core tells its optimizers for it no types: what they keep is in fp32, on the host and on the GPU",
    (None, "fp32"),
)

BESIDE_CPU_OFFLOAD: Mapping[str, Refusal] = dict.fromkeys(
    ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), _FLOAT32_ON_HOST
)
"""Options that work, except with optimizer_cpu_offload."""

BESIDE_PART_ON_HOST: Mapping[str, Refusal] = {
    "overlap_cpu_optimizer_d2h_h2d": Refusal(
        "gradients of what is updated on the GPU become fp32 beside that update, which does not wait for them and would"
        " now and then take wrong ones; grad_reduce_in_fp32=true has none to convert"
    ),
}
"""Options that work, except if the optimizer is offloaded only in part and gradients are reduced in bf16."""

_SCALED = Refusal(
    "Transformer Engine keeps such moments scaled, and megatron-core would leave their scales out of checkpoints",
    (None, "fp32", "bf16"),
)

BESIDE_RECIPE: Mapping[str, Refusal] = {"exp_avg_dtype": _SCALED, "exp_avg_sq_dtype": _SCALED}
"""Options that work, except with an fp8_recipe other than delayed and main parameters in fp32."""

DEEPEP = "deep_ep"
"""The Python package of DeepEP, which constraints/ does not pin."""

WITHOUT_DEEPEP: Mapping[str, Refusal] = {
    "moe_token_dispatcher_type": Refusal(
        "flex sends tokens to experts by DeepEP, which make setup does not install: see github.com/deepseek-ai/DeepEP",
        (None, "alltoall", "allgather"),
    ),
}
"""Options that work, except if a rank's Python cannot import DeepEP."""

DETERMINISTIC = "deterministic_mode"
"""Megatron's option for kernels whose results are bitwise reproducible."""

BESIDE_DETERMINISTIC: Mapping[str, Refusal] = {
    "attention_backend": Refusal(
        "Megatron-LM does not vouch for FlashAttention's gradients", (None, "auto", "fused", "unfused", "local")
    ),
    "cross_entropy_loss_fusion": Refusal("Megatron-LM does not vouch for this kernel"),
}
"""Options that work, except with deterministic_mode."""

ADAPTER_IN_ROWS = (
    f"megatron.{FULLY_SHARDED}=true cuts weights into rows, and an adapter (lora.rank) is merged into whole ones: leave"
    " one of the two out"
)
"""Why an adapter is refused with use_torch_fsdp2."""

NEEDS: Mapping[str, Mapping[str, bool]] = {
    "overlap_param_gather": {"overlap_grad_reduce": False, "use_distributed_optimizer": True},
    "align_param_gather": {"overlap_param_gather": False},
    ON_HOST: {"use_distributed_optimizer": True},
}
"""Option that is on -> options that must then have the value true, each with its default here."""

TESTED: Mapping[str, str] = {
    "tensor_model_parallel_size": "megatron_ext/test_model.py",
    "pipeline_model_parallel_size": "megatron_ext/test_model.py",
    "virtual_pipeline_model_parallel_size": "megatron_ext/test_model.py",
    "context_parallel_size": "megatron_ext/test_context_parallel.py",
    "expert_model_parallel_size": "megatron_ext/test_model.py",
    "expert_tensor_parallel_size": "megatron_ext/test_model.py",
    "num_layers_in_first_pipeline_stage": "megatron_ext/test_foreign_checkpoints.py",
    "num_layers_in_last_pipeline_stage": "megarl/rehearsal/test_trainer_rank.py",
    "overlap_grad_reduce": "megatron_ext/test_overlap.py",
    "overlap_param_gather": "megatron_ext/test_overlap.py",
    "align_param_gather": "megatron_ext/test_overlap.py",
    "bucket_size": "megatron_ext/test_overlap.py",
    "check_for_nan_in_grad": "megatron_ext/test_gradient_norm.py",
    "use_distributed_optimizer": "megarl/test_losses_on_ranks.py",
    "use_torch_fsdp2": "megatron_ext/test_fully_sharded.py",
    "deterministic_mode": "megarl/cluster/test_deterministic_ranks.py",
    "recompute_granularity": "megatron_ext/test_recompute.py",
    "recompute_method": "megatron_ext/test_recompute.py",
    "recompute_num_layers": "megatron_ext/test_recompute.py",
    "recompute_modules": "megatron_ext/test_recompute.py",
    "moe_aux_loss_coeff": "megatron_ext/test_router_losses.py",
    "moe_z_loss_coeff": "megatron_ext/test_router_losses.py",
    "moe_router_bias_update_rate": "megatron_ext/test_expert_load.py",
    "moe_token_dispatcher_type": "megatron_ext/test_model.py",
    "mtp_loss_scaling_factor": "megatron_ext/test_multi_token_prediction.py",
    "optimizer_cpu_offload": "megatron_ext/test_hybrid_optimizer.py",
    "optimizer_offload_fraction": "megatron_ext/test_hybrid_optimizer.py",
    "lr": "megatron_ext/test_checkpoint.py",
    "min_lr": "megatron_ext/test_checkpoint.py",
    "weight_decay": "megatron_ext/test_checkpoint.py",
    "clip_grad": "megatron_ext/test_value_head.py",
    "lr_decay_style": "megatron_ext/test_checkpoint.py",
    "lr_warmup_steps": "megatron_ext/test_checkpoint.py",
    "lr_warmup_init": "megatron_ext/test_arguments.py",
    "lr_decay_steps": "megatron_ext/test_arguments.py",
}
"""Option -> the test, below tests/, that runs it."""


def check_supported(options: Mapping[str, Any]) -> None:
    """Raise UserError for the first option with which training would fail or be wrong."""
    is_padded = options.get(_DISPATCHER) == "hybridep" and bool(options.get(_PADS))
    refuse({name: options[name] for name in options if name != _DISPATCHER or not is_padded}, REFUSED, _PREFIX)
    RouterLosses.of(options)
    is_fully_sharded = options.get(FULLY_SHARDED, False)
    if is_fully_sharded:
        refuse(options, BESIDE_FSDP2, _PREFIX, f" with megatron.{FULLY_SHARDED}=true")
    if options.get(DETERMINISTIC):
        # A configuration names the member of an enum that megatron-core takes.
        named = {
            name: getattr(options[name], "name", options[name]) for name in BESIDE_DETERMINISTIC if name in options
        }
        refuse(named, BESIDE_DETERMINISTIC, _PREFIX, f" with megatron.{DETERMINISTIC}=true")
    if options.get(ON_HOST):
        refuse(options, BESIDE_CPU_OFFLOAD, _PREFIX, f" with megatron.{ON_HOST}=true")
        fraction = options.get("optimizer_offload_fraction", 1.0)
        converts = options.get("use_precision_aware_optimizer") and not options.get("grad_reduce_in_fp32", True)
        if fraction < 1 and converts:
            where = f" with megatron.optimizer_offload_fraction={fraction} and megatron.grad_reduce_in_fp32=false"
            refuse(options, BESIDE_PART_ON_HOST, _PREFIX, where)
    # megatron-core itself keeps main parameters in fp32 beside Adam with such a recipe.
    if (recipe := options.get(_RECIPE)) not in (None, _DELAYED) and options.get("main_params_dtype") in (None, "fp32"):
        refuse(options, BESIDE_RECIPE, _PREFIX, f" with megatron.{_RECIPE}={recipe}")
    for name in (name for name in options if options[name]):
        for needed, default in NEEDS.get(name, {}).items():
            if not options.get(needed, default):
                raise UserError(f"megatron.{name} works only with megatron.{needed}=true: set it too")
    if options.get("optimizer") == "sgd" and options.get("use_distributed_optimizer", not is_fully_sharded):
        raise UserError("megatron.optimizer=sgd works only with megatron.use_distributed_optimizer=false: set it too")
    _check_recompute(options)
    _check_attention_backend(options)
    group, stages = options.get(_GROUP), options.get(_STAGES, 1)
    if group is not None and group < stages:
        raise UserError(
            f"megatron.{_GROUP}={group} must be at least megatron.{_STAGES}={stages}; leave it out for that"
        )


def _check_recompute(options: Mapping[str, Any]) -> None:
    """Raise UserError for recompute options that megatron-core would refuse when a rank is built."""
    granularity, layers = options.get(_GRANULARITY), options.get("recompute_num_layers")
    if granularity == "full":
        for needed, example in (("recompute_method", "uniform"), ("recompute_num_layers", "1")):
            if options.get(needed) is None:
                raise UserError(
                    f"megatron.{_GRANULARITY}=full needs megatron.{needed}: set it, too, for instance to {example}"
                )
    if layers is not None and (granularity == "selective" or layers < 1):
        raise UserError(
            f"megatron.recompute_num_layers={layers} is for megatron.{_GRANULARITY}=full, and at least 1: leave it out"
        )


def _check_attention_backend(options: Mapping[str, Any]) -> None:
    """Raise UserError for Megatron's own attention in layers that may be Transformer Engine's modules.

    Transformer Engine would have no kernel left, and report that in the first pass.
    """
    backend = options.get("attention_backend")
    # A configuration names the member of an enum that megatron-core takes.
    if getattr(backend, "name", backend) == "local" and options.get("transformer_impl") != "local":
        raise UserError(
            "megatron.attention_backend=local works only with megatron.transformer_impl=local: set it too, or leave"
            " both out for the kernels of Transformer Engine"
        )
