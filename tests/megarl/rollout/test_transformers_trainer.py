"""The transformers engine, as it is by default, against the trainer: every family."""

import pytest
import torch
from launch import run_ranks
from parity import VOCABULARY, logits, of_each, sequences
from safetensors.torch import load_file, save_file
from test_deepseek_models import write_model

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megarl.quickstart.tiny_models import TINY_MODELS, write_tiny_model
from megarl.rollout.transformers.arguments import TransformersArguments
from megarl.rollout.transformers.model import SamplingModel

NAMES = (*TINY_MODELS, "moonlight")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders, by name."""
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name in TINY_MODELS:
        write_tiny_model(name, folders[name], fields={"vocab_size": VOCABULARY})
    write_model("moonlight", folders["moonlight"])
    make_latents_small(folders["moonlight"] / "model.safetensors")
    return folders


def make_latents_small(file):
    """So small that their norms show which epsilon they have."""
    tensors = load_file(file)
    small = {name: tensor * 0.1 for name, tensor in tensors.items() if "kv_a_proj" in name}
    save_file({**tensors, **small}, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def trained(models):
    """Log-probs of what follows on each of `sequences`, by name, as the trainer finds them."""
    ends = [torch.tensor([len(tokens) for tokens in batch]).cumsum(0) - 1 for batch in sequences()]
    (results,) = run_ranks(of_each, ParallelSizes(), logits, models)
    return {
        name: torch.cat([batch[last, :VOCABULARY] for batch, last in zip(batches, ends, strict=True)]).log_softmax(-1)
        for name, (_, batches) in results.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_samples_from_the_model_that_is_trained(models, trained, name):
    model = SamplingModel(models[name], TransformersArguments())
    for expected, tokens in zip(trained[name], (each for batch in sequences() for each in batch), strict=True):
        found = model.compute([tokens.tolist()], model.empty_cache()).logits[0].log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_attention_that_leaves_out_the_cap_of_a_model_is_refused(models, load_format):
    with pytest.raises(
        UserError, match=r"attn_implementation=sdpa is not supported with a model that caps .* use eager"
    ):
        SamplingModel(models["gemma2"], TransformersArguments(attn_implementation="sdpa", load_format=load_format))
    assert SamplingModel(models["qwen3"], TransformersArguments(attn_implementation="sdpa")).module is not None


def test_a_gemma_without_a_cap_has_any_attention(tmp_path):
    fields = {"attn_logit_softcapping": None}
    model = SamplingModel(write_tiny_model("gemma2", tmp_path, fields=fields), TransformersArguments()).module
    assert model.config._attn_implementation == "sdpa"
