"""Memory that the plan counts is what real modules and a real optimizer allocate, for every parallel size."""

from collections.abc import Mapping, Sequence
from typing import Any

import planned_memory
import pytest
from planned_memory import FULL, WITHIN, Compared, compare

TWO_RANKS = [name for name, sizes in planned_memory.LAYOUTS.items() if sizes.world_size == 2]


@pytest.mark.parametrize(
    ("model", "layouts", "recomputed"),
    [
        pytest.param("qwen3_moe", TWO_RANKS, {}, marks=pytest.mark.long),
        ("deepseek_v3", ["one rank"], {}),
        pytest.param("deepseek_v3", ["PP 2", "EP 2", "DP 2, FSDP2"], FULL, marks=pytest.mark.long),
    ],
    ids=["without recomputation", "latent attention", "recomputed"],
)
def test_a_rank_allocates_what_was_counted(model: str, layouts: Sequence[str], recomputed: Mapping[str, Any]) -> None:
    found: Mapping[str, list[Compared]] = compare(model, layouts, recomputed)
    assert not too_far_off(found)
    assert [len(ranks) for ranks in found.values()] == [planned_memory.LAYOUTS[each].world_size for each in layouts]


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("qwen3", ["core_attn"]),
        ("qwen3", ["layernorm"]),
        ("deepseek_v3", ["mla_up_proj"]),
        ("deepseek_v3", ["core_attn", "mla_up_proj", "layernorm"]),
    ],
)
def test_modules_that_are_computed_again_spare_what_was_counted(model: str, modules: list[str]) -> None:
    options = {"recompute_granularity": "selective", "recompute_modules": modules}
    assert not too_far_off(compare(model, ["one rank"], options))


@pytest.mark.parametrize(("layout", "recomputed"), [("one rank", {}), ("one rank", FULL), ("DP 2, FSDP2", {})])
def test_a_layer_of_multi_token_prediction_is_counted(
    layout: str, recomputed: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**planned_memory.MODELS["deepseek_v3"], "num_nextn_predict_layers": 1}
    monkeypatch.setitem(planned_memory.MODELS, "deepseek_v3", fields)
    assert not too_far_off(compare("deepseek_v3", [layout], recomputed))


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp2_gathers_some_of_many_layers(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as it gathers of four, which the other models have, is as much as there is in all."""
    fields = {**planned_memory.MODELS["qwen3"], "num_hidden_layers": 7, "tie_word_embeddings": tied}
    monkeypatch.setitem(planned_memory.MODELS, "qwen3", fields)
    found: Mapping[str, list[Compared]] = compare("qwen3", ["DP 2, FSDP2"], {})
    assert not too_far_off(found)
    for each in found["DP 2, FSDP2"]:
        assert 0.5 < each.measured.gathered / (2 * each.measured.weights) < 0.8


def too_far_off(found: Mapping[str, list[Compared]]) -> dict[str, float]:
    return {
        f"{layout}, rank {each.rank}, {part}": ratio
        for layout, ranks in found.items()
        for each in ranks
        for part, ratio in each.ratios.items()
        if abs(ratio - 1) > WITHIN
    }
