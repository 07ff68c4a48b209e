"""The options that a program gives are found, and those that it only speaks of are not."""

import pytest
from given_options import given_options


@pytest.mark.parametrize(
    "source",
    [
        "f(fused=1)",
        'x = {"fused": 1}',
        'run("megatron.fused=true")',
        'run(f"+megatron.fused={x}")',
        'run("rollout.engine_args={other: 1, fused: 2}")',
        'run("--fused", 1)',
    ],
)
def test_an_option_is_given(source: str) -> None:
    assert "fused" in given_options(source)


@pytest.mark.parametrize(
    "source", ["# fused=1", '"""fused=1"""', "fused = 1", 'x = "it is fused"', "f(not_fused=1)", "x.fused"]
)
def test_it_is_only_spoken_of(source: str) -> None:
    assert "fused" not in given_options(source)
