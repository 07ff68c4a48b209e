"""The quickstart before anything of it runs."""

from argparse import Namespace
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.quickstart.run import main, named_for


def test_an_engine_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = Namespace(
        model="qwen3", engine="tgi", weights="as_trained", schedule="sync", steps=None, output_dir=str(tmp_path / "run")
    )
    with pytest.raises(UserError, match=r"rollout\.engine=tgi is not an engine: use one of sglang, transformers, vllm"):
        main(options)
    assert not (tmp_path / "run").exists()


def test_a_recipe_limits_the_context_of_any_engine_by_the_engine_s_own_name() -> None:
    given = {"dtype": "float32", "max_model_len": 32}
    assert named_for("vllm", given) == named_for("transformers", given) == given
    assert named_for("sglang", given) == {"dtype": "float32", "context_length": 32}
