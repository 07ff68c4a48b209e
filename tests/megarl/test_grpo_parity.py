"""GRPO on Megatron ranks against plain torch with transformers: one loss, one set of gradients, at every layout."""

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from reference_grpo import ReferenceTrajectory, grpo_loss_and_gradients, load, response_log_probs

from converters.architectures import read_architecture
from converters.copying import copy_transfers
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan
from megarl.algorithms import AGGREGATIONS, Metrics, PolicyObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import AlgorithmConfig
from megatron_ext.packing.balance import assign
from megatron_ext.packing.packing import RaggedBatch, pack

KL_COEFFICIENT = 0.1
TEMPERATURE = 0.8
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5
"""As a share of the largest number of a tensor's gradient."""
SIZES = {
    "1 rank": ParallelSizes(),
    "EP2": ParallelSizes(world_size=2, expert_model_parallel_size=2),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "DP2": ParallelSizes(world_size=2),
}
# Four layers, so that they divide by two stages; few experts, so that every one gets tokens.
FIELDS = {"num_hidden_layers": 4}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "deepseek_v3"])
def reference(request, tmp_path_factory):
    folder = write_tiny_model(request.param, tmp_path_factory.mktemp(request.param), fields=FIELDS)
    trajectories = make_trajectories(folder)
    loss, gradients = grpo_loss_and_gradients(
        folder, trajectories, kl_coefficient=KL_COEFFICIENT, temperature=TEMPERATURE
    )
    return request.param, folder, trajectories, loss, gradients


@pytest.mark.parametrize("layout", SIZES)
def test_loss_and_gradients_equal_the_reference(reference, layout):
    model, folder, trajectories, loss, gradients = reference
    if model == "qwen3" and layout == "EP2":
        pytest.skip("a dense model has no experts")
    ranks = run_ranks(rank_loss_and_gradients, SIZES[layout], folder, make_batch(trajectories))
    assert float(sum(rank["loss"] for rank in ranks if rank["loss"] is not None)) == pytest.approx(loss, abs=TOLERANCE)
    computed = assemble(folder, SIZES[layout], [rank["gradients"] for rank in ranks], gradients)
    assert computed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        found, wanted = (each / gradient.abs().max() for each in (computed[name], gradient))
        torch.testing.assert_close(found, wanted, atol=GRADIENT_TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def make_trajectories(folder: Path) -> list[ReferenceTrajectory]:
    """Ragged random trajectories; old and reference log-probs near the model's own, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(7)
    model = load(folder)
    trajectories = []
    for index, (prompt, response) in enumerate([(3, 5), (8, 2), (1, 9), (4, 4), (6, 1), (2, 7)]):
        tokens = torch.randint(4, 50, (prompt + response,), generator=generator).tolist()
        bare = ReferenceTrajectory(tokens, prompt, 0.0, [])
        with torch.no_grad():
            log_probs = response_log_probs(model, bare, TEMPERATURE)
        old, kept = (log_probs + 0.3 * torch.randn(response, generator=generator) for _ in range(2))
        advantage = (-1) ** index * (0.5 + index)
        trajectories.append(ReferenceTrajectory(tokens, prompt, advantage, old.tolist(), kept.tolist()))
    return trajectories


def make_batch(trajectories: list[ReferenceTrajectory]) -> RaggedBatch:
    """The same trajectories as the loop would give them to the trainer."""
    responses = torch.tensor([len(t.old_log_probs) for t in trajectories])
    mask = torch.cat([torch.arange(len(t.tokens)) >= t.prompt_length for t in trajectories])

    def on_response(values) -> torch.Tensor:
        return torch.zeros(len(mask)).masked_scatter(mask, torch.as_tensor(values))

    def flat(name: str) -> torch.Tensor:
        return on_response([value for t in trajectories for value in getattr(t, name)])

    return RaggedBatch(
        torch.tensor([token for t in trajectories for token in t.tokens]),
        torch.tensor([len(t.tokens) for t in trajectories]),
        {
            "old_log_probs": flat("old_log_probs"),
            "reference_log_probs": flat("reference_log_probs"),
            "rollout_log_probs": flat("old_log_probs"),
            "advantages": on_response(torch.tensor([t.advantage for t in trajectories]).repeat_interleave(responses)),
            "weights": on_response(AGGREGATIONS["token_mean"](responses)),
        },
    )


def rank_loss_and_gradients(rank: int, sizes: ParallelSizes, folder: Path, batch: RaggedBatch) -> dict:
    from parallel_rank import parallel_rank

    from megatron_ext.forward import forward_backward, predict_labels
    from megatron_ext.megatron_model import MegatronModel
    from megatron_ext.options.options import MegatronOptions

    checkpoint = HuggingFaceCheckpoint(folder)
    architecture = read_architecture(checkpoint.config)
    # Without the distributed optimizer every rank keeps the whole gradient of its weights.
    options = MegatronOptions(
        sizes, torch.float32, optimizer={"lr": 1e-3}, distributed={"use_distributed_optimizer": False}
    )
    model = MegatronModel(architecture, options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(total_steps=1)
    micro_batches = assign(batch.lengths, sizes.data_parallel_size, max_tokens=20)[parallel_rank().data]
    packed = [pack(batch, sequences, sizes.tensor_model_parallel_size) for sequences in micro_batches]
    assert len(packed) > 1
    metrics = forward_backward(
        model.chunks,
        packed,
        PolicyObjective(AlgorithmConfig(kl_coefficient=KL_COEFFICIENT)),
        predict_labels(TEMPERATURE),
    )
    speaks = bool(metrics) and parallel_rank().tensor == 0
    return {
        "loss": Metrics.merge(metrics).sums["policy/loss"] if speaks else None,
        "gradients": {
            name: tensor.main_grad.clone()
            for name, tensor in model.local_tensors().items()
            if isinstance(tensor, torch.nn.Parameter)
        },
    }


def assemble(folder: Path, sizes: ParallelSizes, ranks: list[dict], expected: dict) -> dict[str, torch.Tensor]:
    """Gradients by HF name, each element from one of the ranks that hold it."""
    architecture = read_architecture(HuggingFaceCheckpoint(folder).config)
    shapes = {name: shape for name, shape in architecture.hf_shapes.items() if name in expected}
    whole = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    layout = megatron_layout(architecture, sizes, module_names="local")
    for transfer in plan(layout, huggingface_layout(architecture.hf_shapes)):
        if transfer.hf_name in whole:
            copy_transfers([transfer], ranks[transfer.source_rank], whole)
    return whole
