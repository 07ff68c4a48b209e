"""The refit that is planned: models by name, and how an engine is cut."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from small_step import small_step

from converters.boxes import Box
from converters.errors import UserError
from converters.number_formats import FP8_BLOCK, NumberFormat
from megarl.config.folder import recipes_folder
from megarl.planning.refit import engine_sizes, read_model

PUBLISHED = {
    # Sizes of the models' cards; DeepSeek-V3 and GLM-4.5 (358.34e9 with it) without multi-token prediction.
    "deepseek_v3": 671.03e9,
    "glm_4_5": 352.80e9,
    "kimi_k2": 1026.41e9,
    "llama3_1_70b": 70553706496,
    "qwen2_5_32b": 32763876352,
    "qwen2_5_7b": 7615616512,
    "qwen3_1_7b": 1720574976,
    "qwen3_235b": 235.09e9,
    "qwen3_30b_a3b": 30532122624,
    "qwen3_8b": 8190735360,
}


@pytest.mark.parametrize("name", sorted(file.stem for file in (recipes_folder() / "models").glob("*.json")))
def test_a_shipped_model_has_as_many_parameters_as_was_published(name: str) -> None:
    parameters = sum(map(prod, read_model(name).hf_shapes.values()))
    assert parameters == pytest.approx(PUBLISHED[name], rel=2e-5)


def test_a_model_is_a_name_a_file_or_a_folder_and_leaves_prediction_layers_at_home(tmp_path: Path) -> None:
    config = json.loads((recipes_folder() / "models" / "deepseek_v3.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = [read_model(place) for place in ("deepseek_v3", str(tmp_path), str(tmp_path / "config.json"))]
    assert models[0].hf_shapes == models[1].hf_shapes == models[2].hf_shapes
    assert not any(name.startswith("model.layers.61.") for name in models[0].hf_shapes)


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the model gpt is no config.json, .* none of deepseek_v3, glm_4_5, kimi_k2"):
        read_model("gpt")
    with pytest.raises(UserError, match=r"config.json is missing"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"model_type 'gpt2', which is not supported"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("tensor", "expert", "expected"),
    [
        # ranks, TP, EP, ETP, copies of attention
        (1, None, (1, 1, 1, 1, 1)),
        (8, None, (8, 8, 1, 8, 1)),
        (1, 32, (32, 1, 32, 1, 32)),
        (8, 32, (32, 8, 32, 1, 4)),
        (8, 8, (8, 8, 8, 1, 1)),
    ],
)
def test_an_engine_is_cut_like_vllm_cuts_it(tensor: int, expert: int | None, expected: tuple[int, ...]) -> None:
    sizes = engine_sizes(tensor, expert)
    assert expected == (
        sizes.world_size,
        sizes.tensor_model_parallel_size,
        sizes.expert_model_parallel_size,
        sizes.expert_tensor_size,
        sizes.data_parallel_size,
    )


def test_workers_that_share_a_head_of_keys_have_all_of_it_each() -> None:
    model, name = read_model("qwen3_235b"), "model.layers.0.self_attn.k_proj.weight"
    refit = replace(small_step().refit, architecture=model, engine_architecture=model, engine=engine_sizes(8, None))
    _, engines = refit.layouts()
    boxes = [[each.hf_box for each in engines.placements_of({name})(worker)] for worker in range(8)]
    # Four heads of 128 rows.
    assert boxes == [[Box((128 * head, 0), (128 * (head + 1), 4096))] for head in (0, 0, 1, 1, 2, 2, 3, 3)]


@pytest.mark.parametrize(
    ("tensor", "expert", "says"),
    [
        (0, None, "of engine_tp 0 has no"),
        (1, 0, "of engine_ep 0 has no"),
        (8, 12, "engine_ep 12 is no multiple of engine_tp 8"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(tensor: int, expert: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        engine_sizes(tensor, expert)


@pytest.mark.parametrize(
    ("tensor", "expert", "number_format", "says"),
    [
        (2, 16, None, r"all of attention on each 2 GPUs, .* a machine has 8: give engine_tp 16, or engine_ep 8"),
        # 1,024 rows of an expert over 16 ranks are half a block on each.
        (16, None, FP8_BLOCK, "needs blocks of 128 x 128"),
        (16, 16, FP8_BLOCK, None),
        (2, 8, FP8_BLOCK, None),
        (16, None, None, None),
    ],
)
def test_engines_that_no_run_can_have_are_known(
    tensor: int, expert: int | None, number_format: NumberFormat | None, says: str | None
) -> None:
    refit = replace(small_step().refit, engine=engine_sizes(tensor, expert), number_format=number_format)
    if says is None:
        refit.check_served()
    else:
        with pytest.raises(UserError, match=says):
            refit.check_served()
