"""Every recipe of a large model trains at the tiny scale, with its algorithm, engine and kinds of parallelism."""

import json

import pytest

from megarl.cli.main import main
from megarl.config.folder import recipes_folder

SMALL = ("quickstart", "eval", "chat")
RECIPES = sorted(path.stem for path in recipes_folder().glob("*.yaml") if not path.stem.startswith(SMALL))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("shared_cluster")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_at_the_tiny_scale(recipe, tmp_path):
    assert main(["train", "--config-name", recipe, "+scale=tiny", f"output_dir={tmp_path / 'run'}"]) == 0
    first, *steps = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert "eval/accuracy" in first
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["refit/bytes"] > 0 for line in steps)
    # A critic may learn a step before the policy does.
    assert steps[-1]["policy/gradient_norm"] > 0
    assert (tmp_path / "run/huggingface/model.safetensors").exists()
