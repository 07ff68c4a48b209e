"""Cost of passes over a model, by how it is trained."""

from pathlib import Path

import pytest
import torch

from converters.architectures import Lora, read_architecture, with_head
from converters.cost.compute import forward_flops, update_flops
from converters.formats.safetensors import CONFIG, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.cluster.trainer.model_work import ModelWork
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.options.options import AdapterOptions, MegatronOptions

PLAIN = MegatronOptions(ParallelSizes(), torch.float32)
LORA = Lora(4, 8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("deepseek_v3", tmp_path_factory.mktemp("model"), fields={"num_nextn_predict_layers": 1})


def test_prediction_layers_count_as_they_train(folder: Path) -> None:
    model = read_architecture(read_json(folder / CONFIG))
    updates = {
        training: ModelWork.of(
            folder, "language_model", MegatronOptions(ParallelSizes(), torch.float32, mtp_training=training)
        ).update
        for training in ("none", "detached", "joint")
    }
    assert updates == {
        "none": update_flops(model),
        "detached": update_flops(model, prediction_layers=True, detached=True),
        "joint": update_flops(model, prediction_layers=True),
    }
    assert updates["none"] < updates["detached"] < updates["joint"]


def test_the_reference_has_no_adapter_and_an_update_no_gradient_of_frozen_weights(folder: Path) -> None:
    options = MegatronOptions(ParallelSizes(), torch.float32, mtp_training="none", adapter=AdapterOptions(LORA, seed=0))
    work = ModelWork.of(folder, "language_model", options)
    model = read_architecture(read_json(folder / CONFIG))
    assert work.reference == forward_flops(model)
    assert work.forward == forward_flops(model, LORA)
    assert work.reference < work.forward
    assert work.update.per_token < 3 * work.reference.per_token


def test_a_value_model_has_no_output_layer(folder: Path) -> None:
    work = ModelWork.of(folder, "value", PLAIN)
    model = read_architecture(read_json(folder / CONFIG))
    assert work.forward == forward_flops(with_head(model, "value"))
    assert work.update == (3 * work.forward.per_token, 3 * work.forward.per_square)
    hidden, vocabulary = model.transformer_config["hidden_size"], model.gpt_model["vocab_size"]
    output = 0 if model.gpt_model["share_embeddings_and_output_weights"] else 2 * hidden * (vocabulary - 1)
    assert forward_flops(model).per_token - work.forward.per_token == output
