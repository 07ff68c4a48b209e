"""DeepSeek-V2 and V3, Moonlight and Kimi-K2, and whatever has multi-token prediction, against transformers in fp32."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from long_cases import but_long
from megatron.core.packed_seq_params import PackedSeqParams
from parity import loaded_model, logits, sequences
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from converters.architectures import Architecture, read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.quickstart.tiny_models import add_prediction_layers
from megatron_ext.model.multi_token_prediction import with_mtp_tokens
from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.weights import export_huggingface

TOLERANCE = 1e-4
SIZES = {
    "one": ParallelSizes(),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "VPP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "TP2 PP2 EP2": ParallelSizes(
        world_size=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    ),
}
TINY = {
    "vocab_size": 63,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
V2 = {**TINY, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.7}
V3 = {**TINY, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32, "beta_slow": 1}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {
            **V2,
            "topk_method": "group_limited_greedy",
            # A group is scored by its best expert; megatron-core would sum its best two.
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                **YARN, "rope_theta": 1e4, "factor": 40, "beta_fast": 32, "mscale": 0.707, "mscale_all_dim": 0.707
            },
        },
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**V2, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**V3, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    # A group is scored by its best two experts; megatron-core would take the best one.
    "deepseek_v3_mtp": ("deepseek_v3", {**V3, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 2}),
    "deepseek_v3_mtp_tied": ("deepseek_v3", {**V3, "num_nextn_predict_layers": 1, "tie_word_embeddings": True}),
    # A model of another attention, with the same router and prediction layers.
    "glm4_moe_mtp": ("glm4_moe", {**V3, "num_nextn_predict_layers": 2, "head_dim": 8, "num_key_value_heads": 2}),
    "moonlight": ("deepseek_v3", {**V3, "q_lora_rank": None, "rms_norm_eps": 1e-5}),
    "kimi_k2": (
        "deepseek_v3",
        {
            **V3,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                **YARN, "rope_theta": 5e4, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0
            },
        },
    ),
}  # fmt: skip
MTP_MODELS = ("deepseek_v3_mtp", "deepseek_v3_mtp_tied", "glm4_moe_mtp")


def write_model(name: str, folder: Path) -> PreTrainedModel:
    """A model in `folder`, no tensor of which is constant; returns transformers' own."""
    model_type, fields = MODELS[name]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, dtype=torch.float32, **fields)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.min() == tensor.max():
                tensor += 0.1 * torch.randn(tensor.shape)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "kimi_k2" if name == "kimi_k2" else model_type
    (folder / "config.json").write_text(json.dumps(config))
    if name in MTP_MODELS:
        add_prediction_layers(folder, std=0.15)
    # The norms inside latent attention: transformers does not give them the epsilon of the model, engines do.
    for norm in (module for path, module in model.named_modules() if path.endswith("_a_layernorm")):
        norm.variance_epsilon = config["rms_norm_eps"]
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, PreTrainedModel]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    return {name: (folder, write_model(name, folder)) for name, folder in folders.items()}


def logits_of_each(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, tuple[int, list[Tensor]]]:
    return {name: logits(rank, sizes, folder) for name, folder in folders.items()}


@pytest.mark.parametrize("sizes", but_long(SIZES, "TP2", "VPP2"))
def test_logits_equal_those_of_transformers(sizes: str, models: Mapping[str, tuple[Path, PreTrainedModel]]) -> None:
    results = run_ranks(logits_of_each, SIZES[sizes], {name: folder for name, (folder, _) in models.items()})
    tensor_ranks = SIZES[sizes].tensor_model_parallel_size
    for name, (_, model) in models.items():
        with torch.no_grad():
            expected = [torch.cat([model(tokens[None]).logits[0] for tokens in batch]) for batch in sequences()]
        assert max(logits.abs().max() for logits in expected) > 1
        last_stage = [result[name] for result in results if result[name][1]]
        for start in range(0, len(last_stage), tensor_ranks):
            columns = [batches for _, batches in sorted(last_stage[start : start + tensor_ranks], key=lambda r: r[0])]
            for index, wanted in enumerate(expected):
                got = torch.cat([batches[index] for batches in columns], dim=1)[:, : wanted.shape[1]]
                torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def predictions(rank: int, sizes: ParallelSizes, folder: Path, tokens: Tensor) -> Tensor:
    """This rank's tokens of what each prediction layer gives to the output layer: [layers, tokens, hidden]."""
    model = loaded_model(rank, sizes, folder)[0].eval()
    packed_tokens = pack(RaggedBatch(tokens, torch.tensor([len(tokens)])), [0], sizes.tensor_model_parallel_size)
    batch = with_mtp_tokens(packed_tokens, 2).own
    assert batch.mtp is not None
    ends, longest = batch.cu_seqlens, batch.max_seqlen
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    with torch.no_grad():
        taken = batch.mtp.taken
        _, *outputs = model(batch.tokens, batch.position_ids, None, labels=taken, packed_seq_params=packed)
    return torch.stack(outputs)[:, :, 0]


def expected_predictions(folder: Path, tokens: Tensor) -> list[Tensor]:
    """The same from transformers; every layer has one token less, of which it would not know the next."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # By these patterns transformers finds the layers in the checkpoint; its own is of the released model.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4.*", r"model\.layers\.5.*"]
    mtp = MtpModel.from_pretrained(model).eval()
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state
        outputs = []
        for index, layer in enumerate(mtp.layers):
            embedded = mtp.embed_tokens(tokens[None, index + 1 :])
            positions = torch.arange(embedded.shape[1])[None]
            masks = mtp.create_masks_for_mtp_layer(index, embedded, None, positions)
            rotary = mtp.rotary_emb(embedded, position_ids=positions)
            options = {"position_embeddings": rotary, "position_ids": positions, "past_key_values": None, **masks}
            hidden = layer(embedded, hidden[:, :-1], **options)
            outputs.append(hidden[0])
    return outputs


@pytest.mark.parametrize("sizes", ["one", "TP2"])
@pytest.mark.parametrize("name", ["deepseek_v3_mtp", "glm4_moe_mtp"])
def test_prediction_layers_compute_what_those_of_transformers_do(
    name: str, sizes: str, models: Mapping[str, tuple[Path, PreTrainedModel]]
) -> None:
    folder, _ = models[name]
    tokens = sequences()[0][1]
    got = torch.cat(run_ranks(predictions, SIZES[sizes], folder, tokens), dim=1)
    expected = expected_predictions(folder, tokens)
    assert len(expected) == len(got) == 2
    for layer, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(layer[: len(wanted)], wanted, atol=TOLERANCE, rtol=0)


def export_each(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path], exported: Path) -> None:
    for name, folder in folders.items():
        chunks, architecture = loaded_model(rank, sizes, folder), architecture_of(folder)
        barrier = torch.distributed.barrier
        export_huggingface(chunks, architecture, sizes, rank, exported / name, folder, barrier)


def architecture_of(folder: Path) -> Architecture:
    return read_architecture(HuggingFaceCheckpoint(folder).config)


@pytest.mark.parametrize("sizes", ["VPP2", "TP2 PP2 EP2"])
def test_prediction_layers_come_back_from_the_ranks(
    sizes: str, models: Mapping[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    folders = {name: models[name][0] for name in MTP_MODELS}
    run_ranks(export_each, SIZES[sizes], folders, tmp_path)
    for name, folder in folders.items():
        written = {k: v for file in (tmp_path / name).glob("*.safetensors") for k, v in load_file(file).items()}
        original = load_file(folder / "model.safetensors")
        assert original.keys() - written.keys() == set(architecture_of(folder).exported_copies)
        for tensor_name, tensor in written.items():
            assert torch.equal(tensor, original[tensor_name]), tensor_name
