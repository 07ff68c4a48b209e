"""How a quickstart differs by what engines hold the weights in."""

import json
from pathlib import Path

import pytest

from megarl.quickstart.models import MODELS, UNQUANTISED


@pytest.mark.parametrize("name", MODELS)
def test_the_job_without_a_number_format_differs_in_nothing_else(name: str, tmp_path: Path) -> None:
    chosen = MODELS[name]
    there, plain = set(chosen.in_format("fp8_block")), set(chosen.in_format(UNQUANTISED))
    assert (there - plain, plain - there) == ({"rollout.weights=fp8_block"}, {"rollout.weights=as_trained"})
    assert chosen.in_format("as_trained") == ()
    if name != "smollm2":
        written = [chosen.write(tmp_path / weights, weights) for weights in ("fp8_block", UNQUANTISED, "as_trained")]
        in_blocks, unquantised, usual = (json.loads((each / "config.json").read_text()) for each in written)
        assert in_blocks == unquantised != usual
