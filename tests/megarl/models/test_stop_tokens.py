"""Tokens at which responses are to end are tokens of the model."""

import json

import pytest

from converters.errors import UserError
from megarl.models.policy import check_ends, read_model
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import ModelConfig


def test_a_stop_token_beyond_the_vocabulary_is_refused(tmp_path):
    folder = write_tiny_model("qwen3", tmp_path)
    last = read_model(ModelConfig(str(folder)), []).architecture.hf_config["vocab_size"] - 1
    assert last in read_model(ModelConfig(str(folder)), [0, last]).stop_token_ids
    with pytest.raises(UserError, match=rf"stop_token_ids has {last + 1}, and the model's last token is {last} "):
        read_model(ModelConfig(str(folder)), [0, last + 1])


def test_responses_end_at_the_token_of_config_json_where_no_other_file_names_one_and_have_to_end(tmp_path):
    folder = write_tiny_model("qwen3", tmp_path)
    usual = read_model(ModelConfig(str(folder)), []).stop_token_ids
    (folder / "generation_config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=usual[0])
    assert read_model(ModelConfig(str(folder)), []).stop_token_ids == usual
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert read_model(ModelConfig(str(folder)), []).stop_token_ids == usual
    edit(folder / "config.json", eos_token_id=None)
    check_ends(read_model(ModelConfig(str(folder)), [5]))
    with pytest.raises(UserError, match=r"no token would end a response: .* or set rollout\.stop_token_ids"):
        check_ends(read_model(ModelConfig(str(folder)), []))


def edit(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
