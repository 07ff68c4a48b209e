"""Memory that the plan counts is what real modules and a real optimizer allocate, for every parallel size."""

from collections.abc import Mapping, Sequence
from typing import Any

import planned_memory
import pytest
from planned_memory import FULL, WITHIN, Compared, compare

TWO_RANKS = [name for name, sizes in planned_memory.LAYOUTS.items() if sizes.world_size == 2]


@pytest.mark.parametrize(
    ("model", "layouts", "recomputed"),
    [("qwen3_moe", TWO_RANKS, {}), ("deepseek_v3", ["one rank"], {}), ("deepseek_v3", ["PP 2", "EP 2"], FULL)],
    ids=["without recomputation", "latent attention", "recomputed"],
)
def test_a_rank_allocates_what_was_counted(model: str, layouts: Sequence[str], recomputed: Mapping[str, Any]) -> None:
    found: Mapping[str, list[Compared]] = compare(model, layouts, recomputed)
    off = {
        f"{layout}, rank {each.rank}, {part}": ratio
        for layout, ranks in found.items()
        for each in ranks
        for part, ratio in each.ratios.items()
        if abs(ratio - 1) > WITHIN
    }
    assert not off
    assert [len(ranks) for ranks in found.values()] == [planned_memory.LAYOUTS[each].world_size for each in layouts]
