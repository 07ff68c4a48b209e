"""Tests of megatron_ext: the device layer goes in before megatron is imported."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megarl.quickstart.tiny_models import TINY_MODELS, write_tiny_model
from megatron_ext import device

device.install()
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders of the tiny models, with 4 layers and a vocabulary that tensor parallelism cannot cut evenly.

    No tensor is constant: where all the elements are equal, as in a new norm, a wrong placement would change nothing.
    """
    from parity import VOCABULARY
    from transformers import AutoModelForCausalLM

    folders = {}
    for name in TINY_MODELS:
        folder = write_tiny_model(name, tmp_path_factory.mktemp(name), fields={"num_hidden_layers": 4})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.resize_token_embeddings(VOCABULARY)
        _vary_constants(model)
        model.save_pretrained(folder)
        folders[name] = folder
    return folders


def _vary_constants(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for tensor in model.state_dict().values():
        if tensor.min() == tensor.max():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
