"""Tokens at which responses are to end are tokens of the model."""

import pytest

from converters.errors import UserError
from megarl.models.policy import read_model
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import ModelConfig


def test_a_stop_token_beyond_the_vocabulary_is_refused(tmp_path):
    folder = write_tiny_model("qwen3", tmp_path)
    last = read_model(ModelConfig(str(folder)), []).architecture.hf_config["vocab_size"] - 1
    assert last in read_model(ModelConfig(str(folder)), [0, last]).stop_token_ids
    with pytest.raises(UserError, match=rf"stop_token_ids has {last + 1}, and the model's last token is {last} "):
        read_model(ModelConfig(str(folder)), [0, last + 1])
