"""The reference and the objective are written apart: on the same model they must agree."""

from pathlib import Path

import pytest
import torch
from reference_grpo import (
    ReferenceTrajectory,
    grpo_loss_and_gradients,
    load,
    response_log_probs,
)
from safetensors import safe_open

from megarl.algorithms import Metrics, PolicyObjective
from megarl.quickstart.tiny_models import TINY_MODELS, write_tiny_model
from megarl.schema import AlgorithmConfig
from megatron_ext.log_probs import linear_log_probs
from megatron_ext.packing.packing import RaggedBatch, pack

TEMPERATURE, CLIP_LOW, CLIP_HIGH, KL_COEFFICIENT = 0.9, 0.1, 0.15, 0.3
PROMPT_AND_RESPONSE = ((3, 4), (5, 1), (1, 6))


def trajectories(model: torch.nn.Module) -> list[ReferenceTrajectory]:
    """Random tokens whose old and reference log-probs lie around those of the model, so that some tokens clip."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for number, (prompt, response) in enumerate(PROMPT_AND_RESPONSE):
        tokens = torch.randint(4, 64, (prompt + response,), generator=generator).tolist()
        bare = ReferenceTrajectory(tokens, prompt, (-1.0) ** number * (0.5 + number), [0.0] * response)
        with torch.no_grad():
            log_probs = response_log_probs(model, bare, TEMPERATURE)
        old, reference = log_probs + 0.2 * torch.randn(2, response, generator=generator)
        result.append(ReferenceTrajectory(tokens, prompt, bare.advantage, old.tolist(), reference.tolist()))
    return result


def as_batch(given: list[ReferenceTrajectory]) -> RaggedBatch:
    def on_response(values: list[list[float]]) -> torch.Tensor:
        return torch.cat([torch.tensor([0.0] * t.prompt_length + list(v)) for t, v in zip(given, values, strict=True)])

    responses = [len(t.old_log_probs) for t in given]
    return RaggedBatch(
        torch.cat([torch.tensor(t.tokens) for t in given]),
        torch.tensor([len(t.tokens) for t in given]),
        {
            "weights": on_response([[1 / sum(responses)] * n for n in responses]),
            "advantages": on_response([[t.advantage] * n for t, n in zip(given, responses, strict=True)]),
            "old_log_probs": on_response([list(t.old_log_probs) for t in given]),
            "rollout_log_probs": on_response([list(t.old_log_probs) for t in given]),
            "reference_log_probs": on_response([list(t.reference_log_probs or ()) for t in given]),
        },
    )


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_objective_on_micro_batches_gives_the_references_loss_and_gradients(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_tiny_model(name, folder)
    model = load(folder)
    given = trajectories(model)
    expected_loss, expected = grpo_loss_and_gradients(
        folder,
        given,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl_coefficient=KL_COEFFICIENT,
        temperature=TEMPERATURE,
    )

    objective = PolicyObjective(
        AlgorithmConfig(
            policy_loss_options={"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}, kl_coefficient=KL_COEFFICIENT
        )
    )
    batch, total, pieces = as_batch(given), 0.0, []
    for index in range(len(batch)):
        micro_batch = pack(batch, [index], align=1)
        hidden = model.model(micro_batch.tokens).last_hidden_state[0]
        predictions = linear_log_probs(
            hidden,
            model.lm_head.weight,
            micro_batch.labels[0],
            None,
            temperature=TEMPERATURE,
            softcap=getattr(model.config, "final_logit_softcapping", None),
        )
        loss, metrics = objective(predictions, micro_batch)
        loss.backward()
        total += loss.item()
        pieces.append(metrics)

    assert 0 < Metrics.merge(pieces).values()["policy/clip_fraction"] < 1
    assert total == pytest.approx(expected_loss, abs=1e-6)
    shown = {parameter_name: parameter.grad for parameter_name, parameter in model.named_parameters()}
    direct = {parameter_name: gradient for parameter_name, gradient in shown.items() if parameter_name in expected}
    assert direct
    for parameter_name, gradient in direct.items():
        torch.testing.assert_close(gradient, expected[parameter_name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_gradients_have_the_names_and_shapes_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_tiny_model(name, folder)
    _, gradients = grpo_loss_and_gradients(folder, trajectories(load(folder)))
    stored = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    # The router's correction bias is moved by the load, not by a gradient.
    trained = {key: shape for key, shape in stored.items() if not key.endswith("e_score_correction_bias")}
    assert {key: tuple(gradient.shape) for key, gradient in gradients.items()} == trained
    of_experts = [gradient for key, gradient in gradients.items() if "experts." in key]
    assert not of_experts or any(gradient.any() for gradient in of_experts)
