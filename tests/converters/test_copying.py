import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.boxes import Box
from converters.copying import check_checkpoint, copy_transfers, read_into
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layout import Placement
from converters.plan import Transfer


def rewrite(model, **tensors) -> HuggingFaceCheckpoint:
    """The model's checkpoint with some tensors added or changed; None takes one out."""
    changed = {**model.tensors, **tensors}
    save_file({name: t for name, t in changed.items() if t is not None}, model.folder / "model.safetensors")
    return HuggingFaceCheckpoint(model.folder)


def test_boxes_go_to_their_places_and_the_rest_is_zero(tmp_path):
    save_file({"hf": torch.arange(12.0).view(3, 4)}, tmp_path / "model.safetensors")
    local = torch.full((3, 2), torch.nan, dtype=torch.bfloat16)
    placement = Placement("hf", Box((1, 2), (3, 4)), "local", Box((0, 0), (2, 2)))
    read_into(HuggingFaceCheckpoint(tmp_path), [placement], {"local": local})
    assert local.tolist() == [[6.0, 7.0], [10.0, 11.0], [0.0, 0.0]]


def test_parameters_are_filled_without_a_graph(make_model):
    model = make_model("qwen3")
    parameter = torch.nn.Parameter(torch.empty(18, 8))
    whole = Box.whole((18, 8))
    read_into(HuggingFaceCheckpoint(model.folder), [Placement("lm_head.weight", whole, "p", whole)], {"p": parameter})
    assert torch.equal(parameter, model.tensors["lm_head.weight"])
    assert parameter.grad_fn is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"p": torch.empty(18, 8), "q": torch.empty(1)}, "nothing of the checkpoint belongs to q"),
        ({}, "places elements in p, which is not among the tensors"),
        ({"p": torch.empty(17, 8)}, r"leads out of p, which has shape \[17, 8\]"),
    ],
)
def test_tensors_that_do_not_fit_the_placements_are_an_error(make_model, tensors, message):
    checkpoint, whole = HuggingFaceCheckpoint(make_model("qwen3").folder), Box.whole((18, 8))
    with pytest.raises(ValueError, match=message):
        read_into(checkpoint, [Placement("lm_head.weight", whole, "p", whole)], tensors)


def test_transfers_convert_types_and_check_their_boxes():
    source, destination = torch.arange(4.0).view(2, 2), torch.zeros(3, 3, dtype=torch.bfloat16)
    transfer = Transfer("hf", 0, "s", Box((0, 1), (2, 2)), 1, "d", Box((1, 2), (3, 3)))
    copy_transfers([transfer], {"s": source}, {"d": destination})
    assert destination.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 3]]
    with pytest.raises(ValueError, match="leads out of d"):
        copy_transfers([transfer], {"s": source}, {"d": torch.zeros(2, 2)})


def test_a_complete_checkpoint_passes(make_model):
    for name in ("qwen3", "qwen3_moe", "deepseek_v3"):
        model = make_model(name)
        check_checkpoint(HuggingFaceCheckpoint(model.folder), model.architecture)


def test_a_copy_in_a_multi_token_prediction_layer_must_equal_its_original(make_model):
    model = make_model("deepseek_v3")
    copy, output = "model.layers.4.shared_head.head.weight", model.tensors["lm_head.weight"]
    check_checkpoint(rewrite(model, **{copy: output.clone()}), model.architecture)
    with pytest.raises(UserError, match=rf"holds {copy} with other values than lm_head.weight"):
        check_checkpoint(rewrite(model, **{copy: output + 1}), model.architecture)


def test_declared_prediction_layers_that_are_not_there_are_named(make_model):
    model = make_model("deepseek_v3")
    missing = {name: None for name in model.tensors if name.startswith("model.layers.4.")}
    with pytest.raises(
        UserError, match=r"nothing of the 1 multi-token-prediction .* set num_nextn_predict_layers to 0"
    ):
        check_checkpoint(rewrite(model, **missing), model.architecture)
    del missing["model.layers.4.enorm.weight"]
    with pytest.raises(UserError, match=r"lacks the tensor model.layers.4.hnorm.weight"):
        check_checkpoint(rewrite(model, **missing), model.architecture)


def test_tensors_that_nothing_reads_may_be_there(make_model):
    model = make_model("deepseek_v3")
    unused = "model.layers.3.self_attn.rotary_emb.inv_freq"
    for dtype in (torch.float32, torch.int64):
        check_checkpoint(rewrite(model, **{unused: torch.ones(64, dtype=dtype)}), model.architecture)
    with pytest.raises(UserError, match=r"holds the tensor model.layers.5.self_attn.rotary_emb.inv_freq"):
        check_checkpoint(rewrite(model, **{unused.replace("3", "5"): torch.ones(64)}), model.architecture)


def test_fp8_weights_are_refused(make_model):
    model = make_model("qwen3")
    checkpoint = rewrite(model, **{"lm_head.weight": torch.zeros(18, 8).to(torch.float8_e4m3fn)})
    with pytest.raises(UserError, match=r"holds lm_head.weight in FP8 without its scales"):
        check_checkpoint(checkpoint, model.architecture)


def test_a_missing_expert_is_refused(make_model):
    model = make_model("qwen3_moe")
    missing = "model.layers.2.mlp.experts.3.up_proj.weight"
    with pytest.raises(UserError, match=f"lacks the tensor {missing}"):
        check_checkpoint(rewrite(model, **{missing: None}), model.architecture)


def test_a_copy_of_a_tied_weight_must_equal_it(make_model):
    model = make_model("qwen3", tie_word_embeddings=True)
    embedding = model.tensors["model.embed_tokens.weight"]
    check_checkpoint(rewrite(model, **{"lm_head.weight": embedding.clone()}), model.architecture)
    other = embedding.clone()
    other[-1, -1] += 1
    with pytest.raises(UserError, match=r"holds lm_head.weight with other values than model.embed_tokens.weight"):
        check_checkpoint(rewrite(model, **{"lm_head.weight": other}), model.architecture)
    assert "lm_head.weight" in load_file(model.folder / "model.safetensors")
