import pickle

import pytest
import torch

from converters.architectures import read_architecture
from converters.copying import check_checkpoint
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from megarl.quickstart.tiny_models import write_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NAMES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": None}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mixtral", {}),
        ("glm4_moe", {}),
        (
            "glm4_moe",
            {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0, "n_shared_experts": 2},
        ),
        ("qwen3_moe", {"mlp_only_layers": [2]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 2}),
        ("deepseek_v3", {"n_shared_experts": 2, "tie_word_embeddings": True}),
    ],
)
def test_the_tensors_are_those_that_transformers_writes(name, fields, tmp_path):
    checkpoint = HuggingFaceCheckpoint(write_tiny_model(name, tmp_path / "model", fields=fields))
    architecture = read_architecture(checkpoint.config)
    check_checkpoint(checkpoint, architecture)
    assert architecture.hf_shapes == checkpoint.shapes


def test_fields_of_a_dense_model(config):
    architecture = read_architecture(config("qwen3"))
    fields = architecture.transformer_config
    assert not architecture.multi_latent_attention
    assert architecture.num_experts == 0
    assert (fields["num_query_groups"], fields["kv_channels"], fields["qk_layernorm"]) == (2, 4, True)
    assert (fields["hidden_dropout"], fields["attention_dropout"], fields["layernorm_epsilon"]) == (0.0, 0.0, 1e-6)
    assert fields["activation_func"] is torch.nn.functional.silu
    assert not any(name.startswith("moe") for name in fields)
    assert architecture.gpt_model == {
        "vocab_size": 18,
        "max_sequence_length": 32,
        "position_embedding_type": "rope",
        "rotary_base": 10000.0,
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": False,
    }


@pytest.mark.parametrize(
    "form",
    [
        {"rope_parameters": None, "rope_theta": 500.0, "num_local_experts": None, "num_experts": 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0},
    ],
)
def test_configs_of_old_and_new_transformers_mean_the_same(config, form):
    architecture = read_architecture(config("qwen3_moe", **form))
    assert architecture.gpt_model["rotary_base"] == 500.0
    assert architecture.transformer_config["num_moe_experts"] == 4


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_of_old_and_new_transformers(config, form):
    released = config("llama")
    rope = released["rope_scaling"] | {"factor": 32.0}
    if form == "rope_parameters":
        fields = {"rope_scaling": None, "rope_theta": None, form: {**rope, "rope_theta": 500000.0}}
    else:
        fields = {form: rope}
    architecture = read_architecture(released | fields)
    expected = {
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "rotary_percent": 1.0,
        "rope_scaling": True,
        "rope_scaling_factor": 32.0,
    }
    assert {name: architecture.gpt_model[name] for name in expected} == expected


def test_fields_of_qwen2_and_mixtral(config):
    qwen2 = read_architecture(config("qwen2")).transformer_config
    assert (qwen2["num_query_groups"], qwen2["kv_channels"]) == (2, 2)
    assert (qwen2["add_qkv_bias"], qwen2["add_bias_linear"]) == (True, False)
    mixtral = read_architecture(config("mixtral"))
    expected = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 12,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
    }
    assert {name: mixtral.transformer_config[name] for name in expected} == expected


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1000000}}])
def test_fields_of_glm4_moe(config, rope):
    architecture = read_architecture(config("glm4_moe", **rope, **({"partial_rotary_factor": None} if rope else {})))
    expected = {
        "kv_channels": 6,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 12,
        "mtp_num_layers": 1,
    }
    assert {name: architecture.transformer_config[name] for name in expected} == expected
    assert (architecture.gpt_model["rotary_percent"], architecture.gpt_model["rotary_base"]) == (0.5, 1000000)
    assert architecture.mtp_layers == 1
    assert "model.layers.4.self_attn.q_proj.bias" in architecture.hf_shapes
    assert "model.layers.4.embed_tokens.weight" in architecture.exported_copies


@pytest.mark.parametrize(
    ("fields", "moe_layer_freq"),
    [
        ({}, 1),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
    ],
)
def test_which_layers_have_experts(config, fields, moe_layer_freq):
    assert read_architecture(config("qwen3_moe", **fields)).transformer_config["moe_layer_freq"] == moe_layer_freq


@pytest.mark.parametrize(("normalised", "pre_softmax"), [(True, False), (False, True)])
def test_router_weights_are_normalised_as_configured(config, normalised, pre_softmax):
    fields = read_architecture(config("qwen3_moe", norm_topk_prob=normalised)).transformer_config
    assert fields["moe_router_score_function"] == "softmax"
    assert fields["moe_router_pre_softmax"] is pre_softmax


def test_fields_of_deepseek_v3(config):
    architecture = read_architecture(config("deepseek_v3"))
    expected = {
        "multi_latent_attention": True,
        "q_lora_rank": 5,
        "kv_lora_rank": 7,
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 4,
        "rope_type": "yarn",
        "rotary_base": 10000,
        "rotary_scaling_factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 12,
    }
    assert architecture.multi_latent_attention
    assert {name: architecture.transformer_config[name] for name in expected} == expected


def test_one_group_of_experts_is_no_limit(config):
    fields = read_architecture(config("deepseek_v3", n_group=1, topk_group=1)).transformer_config
    assert "moe_router_num_groups" not in fields


def test_the_expert_bias_stays_float32(config):
    dtypes = read_architecture(config("deepseek_v3")).hf_dtypes(torch.bfloat16)
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3, 4)
    }
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_goes_to_other_processes(name, config):
    architecture = read_architecture(config(name))
    assert pickle.loads(pickle.dumps(architecture)) == architecture


def test_latent_attention_has_no_key_value_heads_to_divide(config):
    shapes = read_architecture(config("deepseek_v3")).hf_shapes
    assert read_architecture(config("deepseek_v3", num_key_value_heads=3)).hf_shapes == shapes


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3", {"model_type": "bloom"}, "'bloom', which is not supported: .*llama, mixtral, .* are"),
        ("qwen3", {"model_type": None}, "config.json has no field model_type"),
        ("qwen3", {"hidden_size": None}, "has no field hidden_size"),
        (
            "qwen3",
            {"hidden_act": "gelu"},
            "has hidden_act = 'gelu', which is not supported: only 'silu' or 'gelu_pytorch_tanh' is",
        ),
        ("qwen3", {"attention_bias": True}, "has attention_bias = True"),
        ("qwen3", {"use_sliding_window": True}, "has use_sliding_window = True"),
        ("qwen3", {"rope_parameters": {"rope_type": "default"}}, "has no rope_theta"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "of type 'linear'"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "has layer_types .*'sliding_attention'"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor = 0.5"),
        ("qwen3", {"head_dim": None}, "has no field head_dim"),
        *(
            (name, {"num_key_value_heads": 3}, "_heads = 3, which does not divide .*_heads = 4; change it to 2 or 4$")
            for name in ("llama", "qwen2", "qwen3", "mixtral", "glm4_moe")
        ),
        ("qwen3", {"num_key_value_heads": 8}, "has num_key_value_heads = 8, which does not divide .*; change it to 4$"),
        ("llama", {"attention_bias": True}, "has attention_bias = True"),
        ("llama", {"mlp_bias": True}, "has mlp_bias = True"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of type 'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None: only 1.0"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "high_freq_factor = 2.0: only 4.0"),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}}, "= 4096: only 8192"),
        ("llama", {"rope_scaling": LLAMA3}, "without a factor"),
        ("qwen2", {"use_sliding_window": True}, "has use_sliding_window = True"),
        ("qwen2", {"use_mrope": True}, "has use_mrope = True"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "has dual_chunk_attention_config = "),
        ("qwen3", {"dual_chunk_attention_config": {"chunk_size": 8}}, "has dual_chunk_attention_config = "),
        ("qwen3_moe", {"dual_chunk_attention_config": {"chunk_size": 8}}, "has dual_chunk_attention_config = "),
        ("mixtral", {"sliding_window": 4096}, "has sliding_window = 4096"),
        ("mixtral", {"num_local_experts": None}, "has no field num_experts"),
        ("glm4_moe", {"norm_topk_prob": False}, "has norm_topk_prob = False"),
        ("glm4_moe", {"rope_scaling": {"rope_type": "yarn"}}, "of type 'yarn'"),
        ("qwen3_moe", {"num_local_experts": None}, "has no field num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "has num_experts_per_tok = 1"),
        *(
            (name, {"num_experts_per_tok": 5}, "has num_experts_per_tok = 5 of 4 experts; change it to at most 4")
            for name in ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "has scoring_func = 'softmax'"),
        ("deepseek_v3", {"norm_topk_prob": False}, "has norm_topk_prob = False"),
        ("deepseek_v3", {"num_experts_per_tok": 3, "topk_group": 1}, "chooses 3 of 4 experts in 1 of 2 groups"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear"}}, "of type 'linear'"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "no yarn parameter original_max_position"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 1, "mscale": 1}},
            "only one of the yarn parameters",
        ),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "attention_factor": 2}}, "the yarn parameter attention_f"),
    ],
)
def test_what_cannot_be_converted_is_refused(config, name, fields, message):
    with pytest.raises(UserError, match=message):
        read_architecture(config(name, **fields))
