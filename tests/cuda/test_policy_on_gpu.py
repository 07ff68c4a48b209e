"""The policy on GPUs: log-probs, gradients and a step, beside transformers on the same weights."""

from functools import cache
from pathlib import Path

import pytest
import torch
from gpus import needs_gpus
from launch import run_ranks
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.copying import copy_transfers
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import device
from megatron_ext.forward import forward_backward, predict_labels
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

pytestmark = [pytest.mark.cuda, needs_gpus(1)]
TEMPERATURE = 0.8
LENGTHS = (40, 7, 133, 1, 64, 18)
MICRO_BATCHES = [[0, 1, 4], [2], [3, 5]]
ONE = ParallelSizes()
TP2 = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
PP2 = ParallelSizes(world_size=2, pipeline_model_parallel_size=2)
EP2 = ParallelSizes(world_size=2, expert_model_parallel_size=2)
# Log-probs in the mean, and the direction of the gradient. Among experts a near tie goes the other way in bf16.
TOLERANCES = {
    ("dense", torch.float32): (1e-4, 1e-6),
    ("dense", torch.bfloat16): (2e-2, 1e-2),
    ("experts", torch.bfloat16): (4e-2, 5e-2),
}
ON_ONE = [
    ("qwen3", torch.float32),
    *((name, torch.bfloat16) for name in ("llama", "qwen3", "qwen3_moe", "deepseek_v3")),
]
ON_TWO = [("qwen3", TP2), ("qwen3", PP2), ("qwen3_moe", EP2), ("deepseek_v3", TP2)]


def make_batch() -> RaggedBatch:
    generator = torch.Generator().manual_seed(3)
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    weights = torch.ones(sum(LENGTHS))
    weights[starts] = 0
    tokens = torch.randint(4, 50, (sum(LENGTHS),), generator=generator)
    return RaggedBatch(tokens, torch.tensor(LENGTHS), {"weights": weights / weights.sum()})


def train(rank: int, sizes: ParallelSizes, folder: Path, dtype: torch.dtype) -> dict:
    """Log-probs, this rank's part of the gradient by HuggingFace names, and the norm of a step's gradient."""
    checkpoint = HuggingFaceCheckpoint(folder)
    architecture = read_architecture(checkpoint.config)
    options = MegatronOptions(sizes, dtype, optimizer={"lr": 1e-3}, distributed={"use_distributed_optimizer": False})
    model = MegatronModel(architecture, options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(2)
    batch = make_batch()
    # Each data-parallel rank has the whole batch here, so that the weights are those of half of it.
    batch = batch.with_fields(weights=batch.fields["weights"] / sizes.data_parallel_size)
    log_probs = model.log_probs(batch, MICRO_BATCHES, temperature=TEMPERATURE)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    forward_backward(
        model.chunks, model.micro_batches_of(batch, MICRO_BATCHES), SftObjective(), predict_labels(TEMPERATURE)
    )
    local = {
        name: getattr(tensor, "main_grad", torch.zeros_like(tensor)).float().cpu()
        for name, tensor in model.local_tensors().items()
    }
    share = {name: torch.zeros(shape) for name, shape in architecture.hf_shapes.items()}
    transfers = plan(
        megatron_layout(architecture, sizes, module_names=model.module_names),
        huggingface_layout(architecture.hf_shapes),
    )
    copy_transfers([each for each in transfers if each.source_rank == rank], local, share)
    norms = [model.train_step(batch, MICRO_BATCHES, SftObjective(), temperature=TEMPERATURE).gradient_norm]
    after = model.log_probs(batch, MICRO_BATCHES, temperature=TEMPERATURE)
    return {
        "log_probs": None if log_probs is None else log_probs.log_probs.cpu(),
        "after": None if after is None else after.log_probs.cpu(),
        "gradient": share,
        "norms": norms,
        "device": str(device.device()),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cache(lambda name: write_tiny_model(name, tmp_path_factory.mktemp(name), fields={"num_hidden_layers": 4}))


def expected(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs (0 for first tokens) and gradients of transformers, in float32 on the weights as `dtype` has them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float().cuda().eval()
    batch, rows = make_batch(), []
    for tokens in batch.tokens.cuda().split(list(LENGTHS)):
        log_p = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        chosen = log_p.gather(1, tokens[1:, None]).squeeze(1)
        rows.append(torch.cat([chosen.new_zeros(1), chosen]))
    log_probs = torch.cat(rows)
    (batch.fields["weights"].cuda() * -log_probs).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients |= one_by_one(name, parameter.grad.float().cpu())
    return log_probs.detach().cpu(), gradients


def one_by_one(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """The experts of a checkpoint, which transformers keeps in one parameter; anything else as it is."""
    start, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = {"gate_proj": 0, "up_proj": 1}
        return {
            f"{start}.{expert}.{half}.weight": both.chunk(2)[place]
            for expert, both in enumerate(stacked)
            for half, place in halves.items()
        }
    if last == "down_proj":
        return {f"{start}.{expert}.down_proj.weight": matrix for expert, matrix in enumerate(stacked)}
    return {name: stacked}


def check(results: list[dict], folder: Path, dtype: torch.dtype, kind: str) -> None:
    log_probs, gradients = expected(folder, dtype)
    tolerance, angle = TOLERANCES[kind, dtype]
    found = next(result for result in results if result["log_probs"] is not None)
    assert (found["log_probs"] - log_probs).abs().mean() < tolerance
    whole = {name: torch.stack([result["gradient"][name] for result in results]).sum(0) for name in gradients}
    one, other = (torch.cat([each[name].flatten() for name in gradients]) for each in (whole, gradients))
    assert 1 - torch.cosine_similarity(one, other, dim=0) < angle
    assert 1 - 2 * angle < one.norm() / other.norm() < 1 + 2 * angle
    assert found["norms"][0] == pytest.approx(float(one.norm()), rel=0.02)
    assert found["after"].mean() > found["log_probs"].mean(), "a step did not make the trained tokens more likely"
    assert all(result["device"].startswith("cuda") for result in results)


def kind_of(name: str) -> str:
    return "experts" if name in ("qwen3_moe", "deepseek_v3") else "dense"


@pytest.mark.parametrize(("name", "dtype"), ON_ONE)
def test_on_one_gpu_it_is_the_model_of_transformers(name, dtype, folder):
    check(run_ranks(train, ONE, folder(name), dtype), folder(name), dtype, kind_of(name))


@needs_gpus(2)
@pytest.mark.parametrize(("name", "sizes"), ON_TWO, ids=["TP2", "PP2", "EP2", "MLA TP2"])
def test_on_two_gpus_it_is_the_model_of_transformers(name, sizes, folder):
    results = run_ranks(train, sizes, folder(name), torch.bfloat16)
    check(results, folder(name), torch.bfloat16, kind_of(name))
