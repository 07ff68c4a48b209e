"""Folders of models beside the policy, looked through before any process starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

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


def test_a_reward_model_has_a_head_that_scores_and_may_write_chats_otherwise(policy, tmp_path, capsys):
    """A critic may lack it, and learns one."""
    check(policy, "quickstart", "+algorithm=ppo", f"critic.path={policy}")
    with pytest.raises(UserError, match=r"reward_model\.path=.* is a language model, without score\.weight"):
        check(policy, "quickstart", f"reward_model.path={policy}")
    classifier = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    shutil.copytree(policy, tmp_path / "classifier")
    classifier.save_pretrained(tmp_path / "classifier")
    check(policy, "quickstart", f"reward_model.path={tmp_path / 'classifier'}")
    assert not capsys.readouterr().err.count("chat template")
    (tmp_path / "classifier/chat_template.jinja").write_text("{{ messages[0].content }}")
    check(policy, "quickstart", f"reward_model.path={tmp_path / 'classifier'}")
    assert "the chat template of reward_model.path=" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["reward_model.path={}", "+algorithm=ppo critic.path={}"])
def test_the_head_of_a_classifier_of_tokens_has_a_bias_and_is_refused(policy, tmp_path, given):
    AutoModelForTokenClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"score\.bias"):
        check(policy, "quickstart", *given.format(tmp_path).split())


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
