import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.architectures import Kind
from converters.copying import check_tensors, copy_transfers, read_into
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layout import check_tiling
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan


@dataclasses.dataclass(frozen=True)
class Rank:
    """Expectation of a rank: its tensor rank, the global layers of its chunks, its experts, its part of an expert."""

    tensor: int = 0
    chunks: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    experts: tuple[int, ...] = (0, 1, 2, 3)
    expert_tensor: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    sizes: dict[str, int]
    ranks: tuple[Rank, ...]


TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
VPP, ETP = "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"
DENSE, MOE = ("llama", "qwen2", "qwen3"), ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
FRONT, BACK, LOW, HIGH = ((0, 1),), ((2, 3),), (0, 1), (2, 3)
DENSE_CASES = {
    "one rank": Case({}, (Rank(),)),
    "tp2": Case({TP: 2}, (Rank(0), Rank(1, expert_tensor=1))),
    "dp2": Case({"world_size": 2}, (Rank(), Rank())),
    "pp2": Case({PP: 2}, (Rank(chunks=FRONT), Rank(chunks=BACK))),
    "pp2, vpp2": Case({PP: 2, VPP: 2}, (Rank(chunks=((0,), (2,))), Rank(chunks=((1,), (3,))))),
    "pp2 uneven": Case(
        {PP: 2, "num_layers_in_first_pipeline_stage": 1}, (Rank(chunks=((0,),)), Rank(chunks=((1, 2, 3),)))
    ),
}
EXPERT_CASES = {
    "ep2": Case({EP: 2, "world_size": 2}, (Rank(experts=LOW), Rank(experts=HIGH))),
    "ep2, tp2, etp1": Case({EP: 2, TP: 2, ETP: 1}, (Rank(0, experts=LOW), Rank(1, experts=HIGH))),
    "tp2, etp1": Case({TP: 2, ETP: 1}, (Rank(0), Rank(1))),
    "tp1, etp2": Case({ETP: 2, "world_size": 2}, (Rank(), Rank(expert_tensor=1))),
    "tp2, pp2, ep2, dp2": Case(
        {TP: 2, PP: 2, EP: 2, "world_size": 8},
        tuple(
            Rank(tensor, chunks, experts, tensor)
            for chunks in (FRONT, BACK)
            for experts in (LOW, HIGH)
            for tensor in (0, 1)
        ),
    ),
}
GROUP_CASES = {"tp4, two to a group": Case({TP: 4, ETP: 1}, tuple(Rank(tensor) for tensor in range(4)))}
MODELS_AND_CASES = [
    *[(name, case) for name in (*DENSE, *MOE) for case in DENSE_CASES],
    *[(name, case) for name in MOE for case in EXPERT_CASES],
    *[(name, "tp4, two to a group") for name in (*DENSE, "qwen3_moe", "mixtral", "glm4_moe")],
]


def sizes_of(case: Case) -> ParallelSizes:
    return ParallelSizes(**{"world_size": len(case.ranks), **case.sizes})


def expected_tensors(
    hf: Mapping[str, Tensor], config: Mapping[str, Any], sizes: ParallelSizes, rank: Rank
) -> dict[str, Tensor]:
    """Tensors that the rank should hold, by plain torch: stack, interleave, chunk. The local names of megatron-core."""
    tp, etp = sizes.tensor_model_parallel_size, sizes.expert_tensor_size

    def cut(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(tp, dim)[rank.tensor]

    def mlp(prefix: str, cut_=cut, names=("gate_proj", "up_proj", "down_proj")) -> tuple[Tensor, Tensor]:
        gate, up, down = (hf[f"{prefix}{name}.weight"] for name in names)
        return torch.cat([cut_(gate, 0), cut_(up, 0)]), cut_(down, 1)

    def vocabulary(tensor: Tensor) -> Tensor:
        padding = -tensor.shape[0] % tp
        return cut(torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]), 0)

    def attention(hf_prefix: str) -> dict[str, Tensor]:
        local = {"linear_proj.weight": cut(hf[hf_prefix + "o_proj.weight"], 1)}
        if config["model_type"] == "deepseek_v3":
            local["linear_kv_down_proj.weight"] = hf[hf_prefix + "kv_a_proj_with_mqa.weight"]
            local["kv_layernorm.weight"] = hf[hf_prefix + "kv_a_layernorm.weight"]
            local["linear_kv_up_proj.weight"] = cut(hf[hf_prefix + "kv_b_proj.weight"], 0)
            if config["q_lora_rank"] is None:
                return local | {"linear_q_proj.weight": cut(hf[hf_prefix + "q_proj.weight"], 0)}
            local["linear_q_down_proj.weight"] = hf[hf_prefix + "q_a_proj.weight"]
            local["q_layernorm.weight"] = hf[hf_prefix + "q_a_layernorm.weight"]
            return local | {"linear_q_up_proj.weight": cut(hf[hf_prefix + "q_b_proj.weight"], 0)}
        groups, hidden = config["num_key_value_heads"], config["hidden_size"]
        qkv = [hf[f"{hf_prefix}{x}_proj.weight"].view(groups, -1, hidden) for x in "qkv"]
        local["linear_qkv.weight"] = cut(torch.cat(qkv, 1).reshape(-1, hidden), 0)
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            biases = [hf[f"{hf_prefix}{x}_proj.bias"].view(groups, -1) for x in "qkv"]
            local["linear_qkv.bias"] = cut(torch.cat(biases, 1).flatten(), 0)
        if config["model_type"] in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
            local |= {f"{x}_layernorm.weight": hf[f"{hf_prefix}{x}_norm.weight"] for x in "qk"}
        return local

    tensors = {}
    for chunk, layers in enumerate(rank.chunks):
        model = f"model{chunk}." if len(rank.chunks) > 1 else ""
        mtp = range(4, 4 + config.get("num_nextn_predict_layers", 0)) if layers[-1] == 3 else ()
        if layers[0] == 0 or mtp:
            tensors[model + "embedding.word_embeddings.weight"] = vocabulary(hf["model.embed_tokens.weight"])
        for i, layer in enumerate(mtp):
            theirs, ours = f"model.layers.{layer}.", f"{model}mtp.layers.{i}."
            tensors[ours + "enorm.weight"] = hf[theirs + "enorm.weight"]
            tensors[ours + "hnorm.weight"] = hf[theirs + "hnorm.weight"]
            tensors[ours + "eh_proj.weight"] = cut(hf[theirs + "eh_proj.weight"], 0)
            tensors[ours + "final_layernorm.weight"] = hf[theirs + "shared_head.norm.weight"]
        prefixes = [
            *(f"decoder.layers.{i}." for i in range(len(layers))),
            *(f"mtp.layers.{i}.transformer_layer." for i in range(len(mtp))),
        ]
        for layer, prefix in zip([*layers, *mtp], prefixes, strict=True):
            theirs, ours = f"model.layers.{layer}.", model + prefix
            tensors[ours + "input_layernorm.weight"] = hf[theirs + "input_layernorm.weight"]
            tensors[ours + "pre_mlp_layernorm.weight"] = hf[theirs + "post_attention_layernorm.weight"]
            for name, tensor in attention(theirs + "self_attn.").items():
                tensors[f"{ours}self_attention.{name}"] = tensor
            is_mixtral = config["model_type"] == "mixtral"
            moe = theirs + ("block_sparse_moe." if is_mixtral else "mlp.")
            if moe + "gate.weight" not in hf:
                tensors[ours + "mlp.linear_fc1.weight"], tensors[ours + "mlp.linear_fc2.weight"] = mlp(theirs + "mlp.")
                continue
            tensors[ours + "mlp.router.weight"] = hf[moe + "gate.weight"]
            for j, expert in enumerate(rank.experts):
                parts = mlp(
                    f"{moe}experts.{expert}.",
                    lambda tensor, dim: tensor.chunk(etp, dim)[rank.expert_tensor],
                    ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj"),
                )
                for number, part in enumerate(parts, start=1):
                    tensors[f"{ours}mlp.experts.local_experts.{j}.linear_fc{number}.weight"] = part
            if config["model_type"] in ("deepseek_v3", "glm4_moe"):
                tensors[ours + "mlp.router.expert_bias"] = hf[theirs + "mlp.gate.e_score_correction_bias"]
                for number, part in enumerate(mlp(theirs + "mlp.shared_experts."), start=1):
                    tensors[f"{ours}mlp.shared_experts.linear_fc{number}.weight"] = part
        if layers[-1] == 3:
            tensors[model + "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not config["tie_word_embeddings"]:
                tensors[model + "output_layer.weight"] = vocabulary(hf["lm_head.weight"])
            elif layers[0] != 0:
                tensors[model + "output_layer.weight"] = vocabulary(hf["model.embed_tokens.weight"])
    return tensors


def load(model, layout, rank: int) -> dict[str, Tensor]:
    """A rank's tensors, full of NaN before they are read."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in layout.local_shapes(rank).items()}
    read_into(HuggingFaceCheckpoint(model.folder), layout.placements(rank), tensors)
    return tensors


def wrong_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    assert actual.keys() == expected.keys()
    return {name for name in actual if not torch.equal(actual[name], expected[name])}


@pytest.mark.parametrize(("name", "case"), MODELS_AND_CASES)
def test_every_rank_holds_what_megatron_expects_and_gives_it_back(name, case, make_model):
    model, case = make_model(name), {**DENSE_CASES, **EXPERT_CASES, **GROUP_CASES}[case]
    sizes = sizes_of(case)
    layout = megatron_layout(model.architecture, sizes, module_names="local")
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.tensors.items()}
    transfers = plan(layout, huggingface_layout(model.architecture.hf_shapes))
    for number, rank in enumerate(case.ranks):
        check_tiling(layout.shard(number))
        tensors = load(model, layout, number)
        assert wrong_tensors(tensors, expected_tensors(model.tensors, model.config, sizes, rank)) == set()
        copy_transfers([t for t in transfers if t.source_rank == number], tensors, back)
    assert wrong_tensors(back, model.tensors) == set()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("parts", [1, 2])
def test_under_fsdp2_ranks_have_rows_that_add_up(name, parts, make_model):
    model = make_model(name, vocab_size=17)
    # Five divide no number of rows; the last have few, padding alone, or none.
    sizes = ParallelSizes(world_size=5 * parts, tensor_model_parallel_size=parts, use_torch_fsdp2=True)
    cut, whole = (megatron_layout(model.architecture, each, module_names="local") for each in (sizes, sizes.unsharded))
    names = set(model.tensors)
    for number in range(sizes.world_size):
        check_tiling(cut.shard(number))
        assert list(cut.placements_of(names)(number)) == list(cut.placements(number))
        rows, expected = placed(model, cut.shard(number)), placed(model, whole.shard(number % parts))
        assert rows.keys() == expected.keys()
        for key, tensor in expected.items():
            chunks, copy = tensor.chunk(5), number // parts
            own = chunks[copy] if copy < len(chunks) else tensor[:0]
            # A buffer is not cut.
            assert torch.equal(rows[key], tensor if key.endswith("expert_bias") else own), key


def placed(model, shard) -> dict[str, Tensor]:
    tensors = {name: torch.zeros(shape) for name, shape in shard.local_shapes.items()}
    for each in shard.placements:
        tensors[each.local_name][each.local_box.slices()] = model.tensors[each.hf_name][each.hf_box.slices()]
    return tensors


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"tie_word_embeddings": True, "head_dim": 2}),
        ("qwen2", {"tie_word_embeddings": True, "vocab_size": 17}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("mixtral", {"vocab_size": 17}),
        ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 2}),
        ("glm4_moe", {"num_nextn_predict_layers": 0, "num_key_value_heads": 1}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"vocab_size": 17}),
    ],
)
@pytest.mark.parametrize("case", DENSE_CASES)
def test_variants_of_the_architectures(name, fields, case, make_model):
    test_every_rank_holds_what_megatron_expects_and_gives_it_back(name, case, lambda name: make_model(name, **fields))


def test_vocabulary_padding_is_declared_and_zero(make_model):
    model = make_model("qwen3", vocab_size=17)
    sizes = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
    layout = megatron_layout(model.architecture, sizes, module_names="local")
    assert [name for name, _ in layout.shard(0).padding] == []
    padding = dict(layout.shard(1).padding)
    assert padding.keys() == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert all((box.start, box.stop) == ((8, 0), (9, 8)) for box in padding.values())
    tensors = load(model, layout, 1)
    assert not tensors["output_layer.weight"][8:].any()
    assert tensors["output_layer.weight"][:8].all()


def with_parameter(architecture, megatron: str, **changes):
    """The architecture with one line of its weight map changed."""
    weight_map = tuple(
        dataclasses.replace(parameter, **changes) if parameter.megatron == megatron else parameter
        for parameter in architecture.weight_map
    )
    assert weight_map != architecture.weight_map
    return dataclasses.replace(architecture, weight_map=weight_map)


def swapped(parameter):
    return {"huggingface": parameter.huggingface[::-1]}


def not_interleaved(parameter):
    return {"kind": Kind.GATED}


@pytest.mark.parametrize(
    ("name", "line", "change"),
    [
        ("llama", "mlp.linear_fc1.weight", swapped),
        ("llama", "self_attention.linear_qkv.weight", not_interleaved),
        ("qwen2", "self_attention.linear_qkv.bias", not_interleaved),
        ("glm4_moe", "mlp.shared_experts.linear_fc1.weight", swapped),
        ("mixtral", "mlp.experts.local_experts.{expert}.linear_fc1.weight", swapped),
    ],
)
def test_the_reference_tells_a_wrong_map_from_a_right_one(name, line, change, make_model):
    """Gate and up swapped, and query, key and value stacked without interleaving: all of them are bijections."""
    model = make_model(name, num_nextn_predict_layers=0)
    line = "decoder.layers.{layer}." + line
    parameter = next(p for p in model.architecture.weight_map if p.megatron == line)
    wrong = with_parameter(model.architecture, line, **change(parameter))
    layout = megatron_layout(wrong, ParallelSizes(), module_names="local")
    check_tiling(layout.shard(0))
    expected = expected_tensors(model.tensors, model.config, ParallelSizes(), Rank())
    experts = range(4) if parameter.is_expert else [0]
    assert wrong_tensors(load(model, layout, 0), expected) == {
        line.format(layer=layer, expert=expert) for layer in parameter.layers for expert in experts
    }


def test_the_reference_tells_shifted_experts(make_model):
    model = make_model("mixtral")
    sizes = ParallelSizes(world_size=2, expert_model_parallel_size=2)
    layout = megatron_layout(model.architecture, sizes, module_names="local")
    expected = expected_tensors(model.tensors, model.config, sizes, Rank(experts=(1, 2)))
    wrong = wrong_tensors(load(model, layout, 0), expected)
    assert wrong == {name for name in expected if ".local_experts." in name}


def test_names_of_transformer_engine_modules(make_model):
    model = make_model("deepseek_v3")
    sizes = ParallelSizes(world_size=2, expert_model_parallel_size=2)
    local, te = (megatron_layout(model.architecture, sizes, module_names=names) for names in ("local", "te"))
    renamed = {
        a.local_name: b.local_name
        for a, b in zip(local.placements(1), te.placements(1), strict=True)
        if a.local_name != b.local_name
    }
    layer = "decoder.layers.0."
    assert renamed[layer + "self_attention.q_layernorm.weight"] == (
        layer + "self_attention.linear_q_up_proj.layer_norm_weight"
    )
    assert renamed[layer + "pre_mlp_layernorm.weight"] == layer + "mlp.linear_fc1.layer_norm_weight"
    assert layer + "input_layernorm.weight" not in renamed
    assert "decoder.layers.1.pre_mlp_layernorm.weight" not in renamed
    assert renamed["decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"] == (
        "decoder.layers.1.mlp.experts.linear_fc2.weight1"
    )
    dense = megatron_layout(make_model("qwen3").architecture, ParallelSizes(), module_names="te")
    assert layer + "self_attention.linear_qkv.layer_norm_weight" in dense.local_shapes(0)
    for rank in range(2):
        check_tiling(te.shard(rank))


@pytest.mark.parametrize(("name", "case"), [("qwen2", "pp2, vpp2"), ("deepseek_v3", "tp2, pp2, ep2, dp2")])
@pytest.mark.parametrize("module_names", ["local", "te"])
def test_a_layout_answers_for_a_few_tensors(make_model, name, case, module_names):
    architecture = make_model(name).architecture
    layout = megatron_layout(architecture, sizes_of({**DENSE_CASES, **EXPERT_CASES}[case]), module_names=module_names)
    for step in (2, 3, 1000):
        names = list(architecture.hf_shapes)[::step]
        placements_of = layout.placements_of(names)
        for rank in range(layout.ranks):
            assert placements_of(rank) == [each for each in layout.placements(rank) if each.hf_name in names]


def test_a_layout_goes_to_other_processes(make_model):
    layout = megatron_layout(make_model("qwen3_moe").architecture, ParallelSizes(), module_names="local")
    assert pickle.loads(pickle.dumps(layout)).placements(0) == layout.placements(0)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3", {TP: 3}, "num_attention_heads = 4 .* by tensor_model_parallel_size = 3; change that size to 2 or 4$"),
        (
            "deepseek_v3",
            {TP: 8},
            "num_attention_heads = 4 .* by tensor_model_parallel_size = 8; change that size to 4$",
        ),
        ("qwen3", {EP: 2}, "the model has no experts for expert_model_parallel_size = 2 to divide; leave it at 1$"),
        ("qwen3", {ETP: 2}, "the model has no experts for expert_tensor_parallel_size = 2 to cut; leave it out$"),
        ("qwen3_moe", {EP: 3}, "4 experts .* by expert_model_parallel_size = 3; change that size to 2 or 4$"),
        ("qwen3_moe", {ETP: 4}, "moe_intermediate_size = 6 cannot be divided by expert_tensor_parallel_size = 4"),
        ("mixtral", {ETP: 8}, "intermediate_size = 12 cannot be divided by expert_tensor_parallel_size = 8"),
        ("qwen3", {PP: 3}, "layers"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(name, sizes, message, make_model):
    with pytest.raises(UserError, match=message):
        megatron_layout(make_model(name).architecture, ParallelSizes(world_size=24, **sizes), module_names="local")


@pytest.mark.parametrize(
    ("heads", "groups", "tensor_parallel", "wrong"),
    [
        (12, 4, 6, "num_key_value_heads = 4 .* by tensor_model_parallel_size = 6; change that size to 4$"),
        (12, 6, 4, "num_key_value_heads = 6 cannot be divided by tensor_model_parallel_size = 4"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(heads, groups, tensor_parallel, wrong, make_model):
    model = make_model("qwen3", num_attention_heads=heads, num_key_value_heads=groups)
    sizes = ParallelSizes(world_size=tensor_parallel, tensor_model_parallel_size=tensor_parallel)
    with pytest.raises(UserError, match=wrong):
        megatron_layout(model.architecture, sizes, module_names="local")


def test_tensors_of_another_shape_are_refused(make_model):
    layout = megatron_layout(make_model("qwen3").architecture, ParallelSizes(), module_names="local")
    tensors = {name: torch.zeros(shape) for name, shape in layout.local_shapes(0).items()}
    check_tensors(layout.local_shapes(0), tensors)
    with pytest.raises(ValueError, match="only the model has surplus"):
        check_tensors(layout.local_shapes(0), {**tensors, "surplus": torch.zeros(1)})
    tensors["output_layer.weight"] = torch.zeros(19, 8)
    with pytest.raises(ValueError, match=r"output_layer.weight has shape \[19, 8\], in the layout \[18, 8\]"):
        check_tensors(layout.local_shapes(0), tensors)
