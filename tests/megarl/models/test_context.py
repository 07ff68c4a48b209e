"""A prompt and its response fit the engine, or that is said before one starts."""

import json

import pytest

from converters.errors import UserError
from converters.formats.safetensors import CONFIG
from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.models.context import check_context, known_context
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}


@pytest.fixture
def job(tmp_path):
    """`job(fields, *overrides)`: a configuration whose model has these fields in its config.json."""

    def make(fields, *overrides):
        (tmp_path / CONFIG).write_text(json.dumps({"max_position_embeddings": 512, **fields}))
        return compose("eval", [f"model.path='{tmp_path}'", "data.eval_files=[x]", "reward.function=x", *overrides])

    return make


@pytest.mark.parametrize(
    ("fields", "overrides", "expected"),
    [
        ({"rope_theta": 10000.0}, [], 512),
        ({"rope_theta": 10000.0}, ["rollout.engine_args.max_model_len=64"], 64),
        ({"rope_theta": 10000.0}, ["rollout.engine=sglang", "rollout.engine_args.context_length=64"], 64),
        # As DeepSeek-V3 has it, and as Qwen advises for long texts.
        ({"rope_parameters": YARN, "max_position_embeddings": 2048}, [], 2048),
        ({"rope_parameters": YARN}, [], 2048),
    ],
)
def test_the_context_is_that_of_the_engines_argument_or_the_models(job, fields, overrides, expected):
    assert known_context(job(fields, *overrides)) == expected


def test_the_longest_prompt_decides(job):
    config = job({"rope_theta": 10000.0}, "rollout.max_response_tokens=500")
    check_context(config, [[1] * 12, [1]])
    with pytest.raises(UserError, match=r"^a prompt of 13 tokens .* the 512 tokens that the model takes: lower "):
        check_context(config, [[1], [1] * 13])


def test_eval_says_so_before_an_engine_starts(tmp_path, capsys):
    folder, files = write_tiny_model("qwen3", tmp_path / "model"), write_arithmetic(tmp_path / "data", held_out=4)
    words = ["eval", "--model", str(folder), "--files", str(files.eval), "--reward", "exact_match"]
    out = tmp_path / "out"
    assert main([*words, "--max-response-tokens", "505", "--output-dir", str(out)]) == 2
    said = capsys.readouterr().err
    assert "--max-response-tokens=505 new ones do not fit the 512 tokens that the model takes" in said
    assert "starting" not in said
    assert not out.exists()
