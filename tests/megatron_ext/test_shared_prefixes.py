"""Shared prefixes are computed once: results and gradients are those of whole sequences."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import run_ranks
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from parallel_rank import parallel_rank
from parity import VOCABULARY, in_huggingface_names
from test_context_parallel import OfWholeResponses
from test_model import assert_same_gradients
from torch import Tensor

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.attention import prefix_attention as prefix_attention_module
from megatron_ext.attention.attention import packed_causal_attention
from megatron_ext.attention.prefix_attention import SharedSequences, _own, prefix_attention
from megatron_ext.attention.rotary import rotate_by_position
from megatron_ext.attention.varlen_kernels import CpuKernel, CudaKernel, Merged, VarlenSequences
from megatron_ext.forward import forward_backward, packed_sequences, predict_labels
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.balance import Cut, assign, computed
from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.packing.prefix_tree import SHORTEST_PREFIX, Prefixes
from megatron_ext.packing.shared_prefixes import SharedPart, share

SIZES = {
    "one": ParallelSizes(),
    "TP2 PP2 VPP2": ParallelSizes(
        world_size=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    ),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "DP2 EP2": ParallelSizes(world_size=2, expert_model_parallel_size=2),
    "DP2 EP2 allgather": ParallelSizes(world_size=2, expert_model_parallel_size=2),
    "TP2 EP2 ETP2": ParallelSizes(
        world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=2
    ),
}
MODELS = {
    "one": ("qwen3", "gemma2", "qwen3_moe", "deepseek_v3"),
    "TP2 PP2 VPP2": ("deepseek_v3",),
    "TP2": ("qwen3", "gemma2"),
    "DP2 EP2": ("qwen3_moe", "deepseek_v3"),
    "DP2 EP2 allgather": ("qwen3_moe",),
    "TP2 EP2 ETP2": ("qwen3_moe",),
}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Sequences of each micro-batch, of each data-parallel rank; one is empty.
CUTS = {1: [[[0, 3, 1, 6], [4, 5, 2], [], [7]]], 2: [[[0, 2, 3], [5]], [[4, 1], [6, 7]]]}


def whole_batch() -> RaggedBatch:
    """Responses to two prompts; two go on together for a while, one is a prompt alone, one is by itself."""
    generator = torch.Generator().manual_seed(3)

    def drawn(length: int) -> Tensor:
        return torch.randint(4, VOCABULARY, (length,), generator=generator)

    prompt, other, turn = drawn(40), drawn(17), drawn(20)
    tails = [
        (prompt, 5),
        (prompt, 30),
        (prompt, 0),
        (prompt, turn, 9),
        (prompt, turn, 1),
        (other, 7),
        (other, 12),
        (50,),
    ]
    tokens = [torch.cat([part if isinstance(part, Tensor) else drawn(part) for part in parts]) for parts in tails]
    weights = [torch.linspace(0.1, 1, len(each)) * (torch.arange(len(each)) >= len(each) // 3) for each in tokens]
    lengths = torch.tensor([len(each) for each in tokens])
    return RaggedBatch(torch.cat(tokens), lengths, {"weights": torch.cat(weights)})


def results(
    rank: int, sizes: ParallelSizes, folders: Mapping[str, Path], shared: bool, transformer: Mapping[str, Any]
) -> dict[str, Any]:
    return {name: results_of_model(rank, sizes, folder, shared, transformer) for name, folder in folders.items()}


def results_of_model(
    rank: int, sizes: ParallelSizes, folder: Path, shared: bool, transformer: Mapping[str, Any]
) -> dict[str, Any]:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes,
        torch.float32,
        # Several micro-batches are under way at a time, and layers run again for their backward pass.
        transformer={**transformer, **(RECOMPUTE if sizes.chunks > 1 else {})},
        optimizer={"lr": 0.0},
        distributed={"use_distributed_optimizer": False},
        shared_prefixes=shared,
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    batch, micro_batches = whole_batch(), CUTS[sizes.data_parallel_size][parallel_rank().data]
    own = sorted(index for sequences in micro_batches for index in sequences)
    batch, micro_batches = batch.select(own), [[own.index(index) for index in each] for each in micro_batches]
    values = None
    if sizes.world_size == 1 and checkpoint.config["model_type"] == "qwen3":
        critic = MegatronModel(read_architecture(checkpoint.config), options, rank, head="value")
        critic.load_huggingface(checkpoint)
        critic.local_tensors()["value_head.weight"].data.normal_(generator=torch.Generator().manual_seed(5))
        values = critic.values(batch, micro_batches), critic.scores(batch, micro_batches)
    predictions = model.log_probs(batch, micro_batches, temperature=0.5)
    packed = model.micro_batches_of(batch, micro_batches)
    metrics = forward_backward(model.chunks, packed, OfWholeResponses(), predict_labels(0.5))
    return {
        "own": own,
        "predictions": predictions,
        "values": values,
        "loss": sum(metrics),
        "computed": sum(each.own.tokens.shape[1] for each in packed),
        "gradient": in_huggingface_names(rank, sizes, folder, model.bare_chunks),
    }


@pytest.fixture(scope="module")
def of_ranks(tiny_models: Mapping[str, Path]) -> Callable[..., list[dict[str, Any]]]:
    @cache
    def run(sizes: str, shared: bool) -> list[dict[str, Any]]:
        folders = {name: tiny_models[name] for name in MODELS[sizes]}
        return run_ranks(results, SIZES[sizes], folders, shared, ALLGATHER if sizes.endswith("allgather") else {})

    return run


@pytest.mark.parametrize(("sizes", "name"), [(sizes, name) for sizes in SIZES for name in MODELS[sizes]])
def test_predictions_loss_and_gradients_are_those_of_whole_sequences(
    sizes: str, name: str, of_ranks: Callable[..., list[dict[str, Any]]]
) -> None:
    parallel, expected = SIZES[sizes], of_ranks("one", False)[0][name]
    found = [each[name] for each in of_ranks(sizes, True)]
    lengths = whole_batch().lengths.tolist()
    losses = {}
    for rank, each in enumerate(found):
        assert each["computed"] < 0.85 * sum(lengths[index] for index in each["own"])
        if each["predictions"] is None:
            continue
        losses[parallel.data_parallel_rank(rank)] = each["loss"]
        for field in ("log_probs", "entropy", "greedy"):
            wanted = [getattr(expected["predictions"], field).split(lengths)[index] for index in each["own"]]
            torch.testing.assert_close(getattr(each["predictions"], field), torch.cat(wanted), atol=1e-5, rtol=0)
    assert sum(losses.values()) == pytest.approx(expected["loss"], rel=1e-5)
    assert_same_gradients([each["gradient"] for each in found], expected["gradient"])
    if found[0]["values"]:
        torch.testing.assert_close(found[0]["values"], expected["values"], atol=1e-4, rtol=1e-5)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Sequences that begin with parts of earlier ones."""
    found = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))]
    for _ in range(draw(st.integers(0, 7))):
        before = draw(st.sampled_from(found))
        kept, repeats = draw(st.integers(0, len(before))), draw(st.integers(1, 20))
        more = draw(st.lists(st.integers(0, 2), min_size=not kept, max_size=4))
        found.append(before[:kept] + more * repeats)
    return found


@given(trees(), st.sampled_from([1, 4]), st.randoms(use_true_random=False))
def test_every_token_sees_those_before_it_in_its_sequence_and_is_there_once(
    sequences: list[list[int]], align: int, random: Any
) -> None:
    chosen = random.sample(range(len(sequences)), len(sequences))
    batch = RaggedBatch(
        torch.tensor([token for each in sequences for token in each]), torch.tensor([len(each) for each in sequences])
    )
    micro_batch = pack(batch, chosen)
    part = share(micro_batch, align)
    for name in ("tokens", "position_ids"):
        assert torch.equal(getattr(part, name)[0, part.places], getattr(micro_batch, name)[0]), name
    assert part.tokens.shape[1] % align == 0
    # Whatever a place sees, as its stretch and the prefixes say, are the places of its sequence up to it.
    seen = _seen(part)
    for places in part.places.split(micro_batch.lengths.tolist()):
        for index, place in enumerate(places.tolist()):
            assert seen[place] == places[: index + 1].tolist()
    unique = {tuple(each[: index + 1]) for each in sequences for index in range(len(each))}
    computed = int(part.places.max()) + 1
    assert len(unique) <= computed <= int(batch.lengths.sum())
    if min(_common(a, b) for a in sequences for b in sequences) >= SHORTEST_PREFIX:
        assert computed <= int(batch.lengths.sum()) - SHORTEST_PREFIX * (len(sequences) - 1)


def _seen(part: SharedPart) -> list[list[int]]:
    seen: list[list[int]] = []
    bounds = part.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        before = [each for level in part.levels for each in level if each.end <= start < each.stop]
        prefix = [place for each in before for place in range(each.start, each.end)]
        seen += [[*prefix, *range(start, place + 1)] for place in range(start, stop)]
    return seen


def _common(a: list[int], b: list[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_short_prefixes_are_not_shared() -> None:
    batch = RaggedBatch(torch.arange(SHORTEST_PREFIX - 1).repeat(3), torch.full((3,), SHORTEST_PREFIX - 1))
    part = share(pack(batch, range(3)), 1)
    assert part.levels == ()
    assert part.tokens.shape[1] == len(batch.tokens)
    empty = share(pack(batch, []), 4)
    assert empty.tokens.shape[1] == 4
    assert empty.places.tolist() == [0]
    records = [[np.zeros(length, "V4")] for length in batch.lengths.tolist()]
    with pytest.raises(ValueError, match="routed experts"):
        share(pack(replace(batch, routed_experts=records), [0]), 1)


def test_attention_in_bf16_rounds_as_that_of_whole_sequences() -> None:
    batch = whole_batch()
    micro_batch = pack(batch, range(len(batch)))
    part = share(micro_batch, 1)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(part.tokens.shape[1], heads, 16, generator=generator) for heads in (4, 2, 2)]
    errors = []
    for dtype in (torch.float64, torch.bfloat16):
        query, key, value = (each.to(dtype).requires_grad_() for each in inputs)
        if dtype == torch.float64:
            rows = (each[part.places] for each in (query, key, value))
            found = packed_causal_attention(*rows, micro_batch.cu_seqlens, softmax_scale=0.3)
        else:
            shared = SharedSequences(bounds=part.bounds, levels=part.levels)
            found = prefix_attention(query, key, value, shared, softmax_scale=0.3)[part.places]
        gradients = torch.autograd.grad(found.square().sum(), (query, key, value))
        errors.append([each.double() for each in (found, *gradients)])
    for expected, rounded in zip(*errors, strict=True):
        assert float((rounded - expected).norm() / expected.norm()) < 0.01


def test_layers_read_nothing_from_the_device_and_share_what_they_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = whole_batch()
    micro_batch = pack(batch, range(len(batch)))
    part = share(micro_batch, 1)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(part.tokens.shape[1], heads, 16, generator=generator) for heads in (4, 2, 2)]
    expected = packed_causal_attention(*(each[part.places] for each in inputs), micro_batch.cu_seqlens, softmax_scale=1)
    # Tensors without values: whoever reads one fails, as it would wait for a GPU.
    shared = packed_sequences(part.to(torch.device("meta")))
    planned = []
    monkeypatch.setattr(prefix_attention_module, "_own", lambda bounds: planned.append(bounds) or _own(bounds))
    for _layer in range(2):
        found = prefix_attention(*inputs, shared, softmax_scale=1.0)
        torch.testing.assert_close(found[part.places], expected, atol=1e-5, rtol=0)
    assert planned == [tuple(part.cu_seqlens.tolist())]


@st.composite
def steps(draw: st.DrawFn) -> list[list[int]]:
    """Conversations of a step: what they begin with is often that of another one, and as often long as short."""
    found: list[list[int]] = []
    for number in range(draw(st.integers(0, 12))):
        before = draw(st.sampled_from(found)) if found and draw(st.integers(0, 5)) else []
        kept = draw(st.integers(0, len(before)))
        found.append(before[:kept] + [100 + number] * draw(st.integers(not kept, 30)))
    return found


def work_of(sequences: Sequence[Sequence[int]], cut: Cut) -> list[tuple[int, int]]:
    """The tokens that go through the model in each micro-batch, and the squares that their attention takes."""
    tokens = torch.tensor([token for each in sequences for token in each])
    batch = RaggedBatch(tokens, torch.tensor([len(each) for each in sequences]))
    parts = [share(pack(batch, members), 1) for rank in cut for members in rank if members]
    # The i-th token of a sequence makes its square larger by 2 i + 1.
    return [(part.tokens.shape[1], int((2 * part.position_ids + 1).sum())) for part in parts]


@given(steps(), st.sampled_from([1, 2]), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 150))
def test_what_is_counted_goes_through_the_model_and_fits(
    sequences: list[list[int]], unit: int, ranks: int, multiple: int, more: int
) -> None:
    sequences = sequences[: len(sequences) // unit * unit]
    lengths = [len(each) for each in sequences]
    units = [list(range(start, start + unit)) for start in range(0, len(sequences), unit)]
    max_tokens = more + max((tokens for each in units for tokens, _ in work_of(sequences, [[each]])), default=1)
    prefixes = Prefixes.of([np.array(each) for each in sequences])
    cut = assign(lengths, ranks, max_tokens, unit, multiple, attention_length=100.0, prefixes=prefixes)
    chosen = [members for rank in cut for members in rank]
    assert sorted(index for members in chosen for index in members) == list(range(len(sequences)))
    assert all(members[at : at + unit] in units for members in chosen for at in range(0, len(members), unit))
    assert len({len(rank) for rank in cut}) == 1
    assert len(cut[0]) % multiple == 0
    work = work_of(sequences, cut)
    assert all(tokens <= max_tokens for tokens, _ in work)
    assert computed(cut, lengths, prefixes) == (sum(each for each, _ in work), sum(each for _, each in work))


def families_of(prefix: int, own: Sequence[Sequence[int]], begin: int = 0) -> list[list[int]]:
    """Responses to prompts of `prefix` tokens, of so many tokens of their own; all begin with `begin` more."""
    return [
        [7] * begin
        + [1000 * number + token for token in [*range(prefix), *range(100 * index + 50, 100 * index + 50 + length)]]
        for number, responses in enumerate(own)
        for index, length in enumerate(responses)
    ]


def dealt(sequences: Sequence[Sequence[int]], ranks: int, max_tokens: int, unit: int = 1) -> Cut:
    prefixes = Prefixes.of([np.array(each) for each in sequences])
    return assign([len(each) for each in sequences], ranks, max_tokens, unit, prefixes=prefixes)


@pytest.mark.parametrize("begin", [0, 20], ids=["", "a system prompt"])
def test_families_stay_whole_unless_ranks_would_wait(begin: int) -> None:
    several = families_of(30, [[10] * 8, [10] * 8], begin)
    assert sorted(dealt(several, 2, 1000)) == [[list(range(8))], [list(range(8, 16))]]
    assert sorted(dealt(several, 1, 110 + begin)[0]) == [list(range(8)), list(range(8, 16))]
    alone = several[:8]
    assert [[len(members) for members in rank] for rank in dealt(alone, 4, 1000)] == [[2]] * 4
    # Two prefixes of 30 tokens and eight responses of 10 are no more than 140, in two parts of the family.
    assert [[len(members) for members in rank] for rank in dealt(alone, 1, 80 + begin)] == [[4, 4]]


def test_a_stretch_that_is_too_short_beside_another_item_is_counted_as_often_as_it_is_computed() -> None:
    """Eight sequences share 36 tokens, of which a ninth has 25 and all have 20: beside it 11 are computed eight times.

    The two are items of which each would fit with what the other is alone, and where there is another family parts.
    """
    eight = [[*[1] * 25, *[2] * 11, *[10 + number] * 5] for number in range(8)]
    sequences = [*eight, [*[1] * 25, *[3] * 5], [*[1] * 20, *[4] * 130]]
    assert [each for each, _ in work_of(sequences, [[list(range(8))], [list(range(9))]])] == [76, 158]
    prefixes = Prefixes.of([np.array(each) for each in sequences])
    cut = assign([len(each) for each in sequences], 2, 150, attention_length=1.0, prefixes=prefixes)
    assert max(each for each, _ in work_of(sequences, cut)) == 150
    more = [*sequences, [8] * 30]
    assert max(each for each, _ in work_of(more, dealt(more, 1, 150))) == 150


def test_prefixes_of_two_depths_and_pairs_are_counted_as_they_are_packed() -> None:
    """Two prompts, the first with two continuations; all in the order in which they were drawn, not in this."""
    prompts = families_of(0, [[40], [40]])
    first, second = ([*prompts[0], *[5000 + number] * 50] for number in range(2))
    own = iter(range(9000, 9008))
    whole = [[*before, *[next(own)] * 10] for before in (first, second, prompts[1], first, second, prompts[1])]
    # 90 + 2 * 10 tokens of each continuation, 40 + 2 * 10 of the other prompt.
    assert sorted(dealt(whole, 1, 110)[0]) == [[0, 3], [1, 4], [2, 5]]
    assert [each for each, _ in work_of(whole, dealt(whole, 1, 110))] == [110, 110, 60]
    assert [each for each, _ in work_of(whole, dealt(whole, 1, 180))] == [180, 60]
    pairs = families_of(40, [[10, 10], [10, 10]])
    assert dealt(pairs, 1, 60, unit=2) == [[[0, 1], [2, 3]]]
    with pytest.raises(UserError, match="2 sequences that belong together, of 60 tokens does not fit"):
        dealt(pairs, 1, 59, unit=2)


def test_the_fused_kernel_takes_and_gives_what_the_one_for_cpus_does() -> None:
    """Shapes and types alone, by torch's own account of its kernel for CUDA; no GPU is needed for that."""
    stretches = VarlenSequences((40, 24), (16, 8), is_causal=False, scale=0.1)
    query, key, value = (torch.randn(length, heads, 64) for length, heads in ((64, 4), (24, 2), (24, 2)))
    results = []
    for kernel, place in ((CpuKernel(), "cpu"), (CudaKernel(), "meta")):
        inputs = [each.to(place, torch.bfloat16) for each in (query, key, value)]
        output, total = kernel.forward(*inputs, stretches)
        gradients = kernel.backward(*inputs, Merged(torch.ones_like(output), output, total), stretches)
        results.append([(each.shape, each.dtype) for each in (output, total, *gradients)])
    assert results[0] == results[1]


class _Rotated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_pos_emb = YarnRotaryEmbedding(16, original_max_position_embeddings=64, use_cpu_initialization=True)

    def forward(self, length: int, packed_seq_params: PackedSeqParams) -> tuple[Tensor, float]:
        return self.rotary_pos_emb(length)


def test_yarn_rotates_by_position_too_and_only_where_prefixes_are_shared() -> None:
    model = _Rotated()
    expected, factor = model(9, packed_seq_params=PackedSeqParams())
    rotate_by_position(model)
    positions = torch.tensor([0, 1, 2, 2, 3, 2])
    picked, same = model(9, packed_seq_params=SharedSequences(positions=positions))
    assert same == factor
    assert torch.equal(picked, expected[positions])
    assert torch.equal(model(9, packed_seq_params=PackedSeqParams())[0], expected)
