"""Prediction layers that are recomputed by Transformer Engine, whose function knows gradients of its tensors alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ext.model.multi_token_prediction import PredictionLayer


def checkpoint_as_transformer_engine(function: Any, _distribute: Any, _tracker: Any, _group: Any, *args: Any) -> Any:
    """Like `transformer_engine.pytorch.checkpoint` 2.11: tensors that come by name have no gradient."""
    return checkpoint(function, *args, use_reentrant=True)


def test_the_weights_of_a_layer_have_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "te_checkpoint", checkpoint_as_transformer_engine)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    weight = torch.full((3,), 2.0, requires_grad=True)
    calls = []

    def project(*, hidden_states: Tensor, decoder_input: Tensor, packed_seq_params: str) -> Tensor:
        calls.append(packed_seq_params)
        return hidden_states * weight + decoder_input

    layer: Any = SimpleNamespace(
        config=SimpleNamespace(fp8="hybrid", distribute_saved_activations=False), _proj_and_transformer_layer=project
    )
    hidden, inputs = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    outputs = PredictionLayer._checkpointed_forward(
        layer, project, hidden_states=hidden, decoder_input=inputs, packed_seq_params="bounds"
    )
    outputs.sum().backward()
    for tensor, expected in ((weight, 1.0), (hidden, 2.0), (inputs, 1.0)):
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [expected] * 3
    assert calls == ["bounds", "bounds"]
