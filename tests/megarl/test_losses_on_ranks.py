"""Every policy loss on Megatron ranks: the same loss and gradients for every number of micro-batches and ranks."""

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from test_grpo_parity import TEMPERATURE, make_batch, make_trajectories

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import AGGREGATIONS, POLICY_LOSSES, Metrics, PolicyObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import AlgorithmConfig, CorrectionConfig
from megatron_ext.packing.balance import assign
from megatron_ext.packing.packing import RaggedBatch, pack

# Share of the largest gradient: what the order of sums in fp32 leaves.
TOLERANCE = 1e-6 if torch.cpu._is_avx512_supported() else 2e-6
"""Rounding; AVX2 adds up in another order, and up to 1.1e-6 was seen."""
WHOLE, PIECES = 1000, 20
"""Tokens of a micro-batch: all sequences in one, or hardly two."""


COVARIANCES = {"covariance_fraction": 0.3, "covariance_low": -5.0}


def objectives() -> dict[str, PolicyObjective]:
    """Each loss with a KL, an entropy bonus and a correction that goes with it."""
    factors = {True: CorrectionConfig("sequence_importance", high=1.5), False: CorrectionConfig("icepop", 0.7, 1.5)}
    found = {
        name: PolicyObjective(
            AlgorithmConfig(
                policy_loss=name,
                aggregation="seq_mean_token_mean",
                kl_coefficient=0.1,
                entropy_coefficient=0.01,
                corrections=[factors[loss.of_response]],
                policy_loss_options={k: v for k, v in COVARIANCES.items() if k in POLICY_LOSSES[name].options},
            )
        )
        for name, loss in POLICY_LOSSES.items()
    }
    far = {"ratio_to": "rollout", "kl_unbiased": True, "off_policy_mask": 0.05}
    return found | {"off-policy": PolicyObjective(AlgorithmConfig(kl_coefficient=0.1, **far))}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = write_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    batch = make_batch(make_trajectories(folder))
    lengths = (batch.fields["weights"] != 0).long().split(batch.lengths.tolist())
    by_response = AGGREGATIONS["seq_mean_token_mean"](torch.stack([each.sum() for each in lengths]))
    weights = batch.fields["weights"].masked_scatter(batch.fields["weights"] != 0, by_response)
    batch = batch.with_fields(weights=weights, rollout_log_probs=0.5 * batch.fields["reference_log_probs"])
    (expected,) = run_ranks(losses_and_gradients, ParallelSizes(), folder, batch, WHOLE)
    return folder, batch, expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_cut_changes_a_loss_or_a_gradient(case, ranks: int) -> None:
    folder, batch, expected = case
    cut = run_ranks(losses_and_gradients, ParallelSizes(world_size=ranks), folder, batch, PIECES)
    for name, (loss, gradients) in expected.items():
        assert sum(rank[name][0] for rank in cut) == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE), name
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        assert largest > 0, name
        for tensor, gradient in gradients.items():
            difference = (cut[0][name][1][tensor] - gradient).abs().max()
            assert float(difference) <= TOLERANCE * largest, (name, tensor)


def losses_and_gradients(rank: int, sizes: ParallelSizes, folder: Path, batch: RaggedBatch, max_tokens: int) -> dict:
    """By loss: its value over this rank's micro-batches, and the gradients of all ranks together."""
    from parallel_rank import parallel_rank

    from megatron_ext.forward import forward_backward, predict_labels
    from megatron_ext.megatron_model import MegatronModel
    from megatron_ext.options.options import MegatronOptions

    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes, torch.float32, optimizer={"lr": 1e-3}, distributed={"use_distributed_optimizer": False}
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(total_steps=1)
    cut = assign(batch.lengths, sizes.data_parallel_size, max_tokens)[parallel_rank().data]
    results = {}
    for name, objective in objectives().items():
        chosen = {}
        if objective.needs_selection:
            chosen["chosen"] = objective.select(batch, batch.fields["reference_log_probs"], seed=(0,))
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        packed = [pack(batch.with_fields(**chosen), sequences) for sequences in cut]
        metrics = forward_backward(model.chunks, packed, objective, predict_labels(TEMPERATURE))
        gradients = {
            key: tensor.main_grad.clone()
            for key, tensor in model.local_tensors().items()
            if isinstance(tensor, torch.nn.Parameter)
        }
        results[name] = float(Metrics.merge(metrics).sums["policy/loss"]), gradients
    return results
