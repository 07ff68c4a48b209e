"""Folders of models beside the policy, looked through before any process starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.models.auxiliary import check_auxiliary
from megarl.models.policy import read_model
from megarl.quickstart.tiny_models import write_tiny_model

COPY, ORIGINAL = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A model with its output layer tied to the embedding."""
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("policy"), fields={"tie_word_embeddings": True})


@pytest.fixture
def damaged(policy, tmp_path):
    """The same with a copy of the embedding that is none."""
    folder = tmp_path / "damaged"
    shutil.copytree(policy, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, COPY: torch.zeros_like(tensors[ORIGINAL])}, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


def check(policy, recipe, *overrides):
    config = compose(recipe, [f"model.path={policy}", "megatron.expert_model_parallel_size=1", *overrides])
    check_auxiliary(config, read_model(config.model, []), [])


def test_a_copy_of_a_teachers_weight_equals_it(policy, damaged):
    check(policy, "quickstart_distillation", f"teachers.sums.path={policy}")
    with pytest.raises(UserError, match=rf"damaged holds {COPY} with other values than {ORIGINAL}"):
        check(policy, "quickstart_distillation", f"teachers.sums.path={damaged}")


def test_a_critic_has_no_output_layer(policy, damaged):
    check(policy, "quickstart_ppo", f"critic.path={damaged}")


def test_nothing_waits_for_prediction_layers_that_stay(tmp_path):
    predicting = write_tiny_model(
        "deepseek_v3", tmp_path, fields={"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    )
    stages = ["megatron.pipeline_model_parallel_size=2", "+megatron.overlap_grad_reduce=true"]
    with pytest.raises(UserError, match=r"left alone: set overlap_grad_reduce=false in implicit_reward_model\.meg"):
        check(predicting, "quickstart", "+algorithm=prime", *stages)
    own = "+implicit_reward_model.megatron={overlap_grad_reduce: false}"
    check(predicting, "quickstart", "+algorithm=prime", *stages, own)
    check(predicting, "quickstart", "+algorithm=ppo", *stages)
