"""The benchmark of `megarl plan` is about the refits that it names."""

import plan
import pytest


@pytest.mark.parametrize(
    ("case", "sources", "destinations", "dtype"),
    [
        ("671B, TP32 bf16 x 8", 512, 256, "bf16"),
        ("671B, EP32 + DP attention FP8 x 8", 512, 256, "fp8_block"),
        ("671B, TP16 FP8 x 16", 512, 256, "fp8_block"),
        ("1T, 256 -> EP32 + DP attention FP8 x 4", 256, 128, "fp8_block"),
    ],
)
def test_a_case_is_what_its_name_says(case: str, sources: int, destinations: int, dtype: str) -> None:
    refit = plan.refit_of(plan.CASES[case])
    source, destination = refit.layouts()
    assert (source.ranks, refit.destinations, refit.engine_dtype) == (sources, destinations, dtype)
    assert destination.ranks * refit.replicas == destinations
    assert source.shard(sources - 1).placements
    assert destination.shard(0).placements
