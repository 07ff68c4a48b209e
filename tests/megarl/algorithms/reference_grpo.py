"""One GRPO step in plain torch with HuggingFace transformers: what every Megatron layout is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True)
class ReferenceTrajectory:
    """One sequence; the log-probs are those of its response, `tokens[prompt_length:]`."""

    tokens: Sequence[int]
    prompt_length: int
    advantage: float
    old_log_probs: Sequence[float]
    reference_log_probs: Sequence[float] | None = None


def load(folder: Path) -> torch.nn.Module:
    """The model in fp32, with the plainest implementation of attention and experts."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train()


def response_log_probs(model: torch.nn.Module, trajectory: ReferenceTrajectory, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of the response tokens, [response length]."""
    tokens = torch.tensor(trajectory.tokens)
    log_p = torch.log_softmax(model(tokens[None]).logits[0] / temperature, dim=-1)
    return log_p[:-1].gather(1, tokens[1:, None]).squeeze(1)[trajectory.prompt_length - 1 :]


def grpo_loss_and_gradients(
    folder: Path,
    trajectories: Sequence[ReferenceTrajectory],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    temperature: float = 1.0,
) -> tuple[float, dict[str, Tensor]]:
    """Token-mean loss, and its gradient in every tensor by the name it has in the checkpoint (one per expert)."""
    model = load(folder)
    response_tokens = sum(len(trajectory.old_log_probs) for trajectory in trajectories)
    total = 0.0
    for trajectory in trajectories:
        log_probs = response_log_probs(model, trajectory, temperature)
        ratio = torch.exp(log_probs - torch.tensor(trajectory.old_log_probs))
        clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
        loss = -torch.minimum(ratio * trajectory.advantage, clipped * trajectory.advantage)
        if kl_coefficient:
            difference = torch.tensor(trajectory.reference_log_probs) - log_probs
            loss = loss + kl_coefficient * (torch.exp(difference) - difference - 1)
        loss = loss.sum() / response_tokens
        loss.backward()
        total += loss.item()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return total, revert_weight_conversion(model, gradients)
