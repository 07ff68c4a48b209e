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
    """Folders of the tiny models, with 4 layers and a vocabulary that tensor parallelism cannot cut evenly."""
    from parity import VOCABULARY
    from transformers import AutoModelForCausalLM

    folders = {}
    for name in TINY_MODELS:
        folder = write_tiny_model(name, tmp_path_factory.mktemp(name), fields={"num_hidden_layers": 4})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.resize_token_embeddings(VOCABULARY)
        model.save_pretrained(folder)
        folders[name] = folder
    return folders
