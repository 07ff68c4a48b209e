import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megarl.cluster.trainer import cuts
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.cuts import cut_batch, in_order, share_of
from megatron_ext.model.multi_token_prediction import with_mtp_tokens
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing import shared_prefixes
from megatron_ext.packing.balance import Cut, assign
from megatron_ext.packing.longest_processing_time import costliest_first, fill_bins
from megatron_ext.packing.packing import RaggedBatch, pack, unpack


def ragged(lengths: list[int]) -> RaggedBatch:
    """Token ids 100, 101, ... so that every token is recognisable; a field that repeats them as negative floats."""
    tokens = 100 + torch.arange(sum(lengths))
    return RaggedBatch(tokens, torch.tensor(lengths, dtype=torch.long), {"value": -tokens.float()})


# The same examples in every run, and no wall-time limits.
deterministic = settings(deadline=None, derandomize=True)
lengths_of_sequences = st.lists(st.integers(1, 9), max_size=12)


def test_a_micro_batch_spelled_out() -> None:
    batch = RaggedBatch(
        torch.tensor([5, 6, 7, 8, 9]),
        torch.tensor([3, 2]),
        {"weight": torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]), "mask": torch.tensor([True] * 5)},
    )
    micro_batch = pack(batch, [1, 0], align=4)
    assert micro_batch.tokens.tolist() == [[8, 9, 5, 6, 7, 0, 0, 0]]
    assert micro_batch.labels.tolist() == [[9, 0, 6, 7, 0, 0, 0, 0]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert micro_batch.cu_seqlens.tolist() == [0, 2, 5, 8]
    assert micro_batch.cu_seqlens.dtype == torch.int32
    assert micro_batch.max_seqlen == 3
    assert micro_batch.targets.tolist() == [True, False, True, True, False, False, False, False]
    torch.testing.assert_close(micro_batch.fields["weight"], torch.tensor([0.4, 0, 0.1, 0.2, 0, 0, 0, 0]))
    assert torch.equal(micro_batch.fields["mask"], micro_batch.targets)


@pytest.mark.parametrize("is_shared", [False, True])
def test_all_tensors_of_a_micro_batch_move_with_it(is_shared: bool) -> None:
    micro_batch = pack(ragged([4, 3]), [0, 1], align=4)
    if is_shared:
        micro_batch = replace(micro_batch, part=shared_prefixes.share(micro_batch, align=4))
    moved = with_mtp_tokens(micro_batch, 2).to(torch.device("meta"))
    mtp = moved.own.mtp
    assert mtp is not None
    tensors = [each for part in (moved, moved.own) for each in vars(part).values() if isinstance(each, torch.Tensor)]
    assert {each.device.type for each in (*tensors, *mtp, *moved.fields.values())} == {"meta"}


@deterministic
@given(lengths_of_sequences, st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_index_holds_its_label_and_its_labels_fields(lengths, align, random) -> None:
    batch = ragged(lengths)
    order = random.sample(range(len(lengths)), len(lengths))
    micro_batch = pack(batch, order, align)
    sequences = [batch.tokens.split(lengths)[index].tolist() for index in order]

    size = micro_batch.tokens.shape[1]
    assert size % align == 0
    assert size - sum(lengths) < align or not lengths
    boundaries = micro_batch.cu_seqlens.tolist()
    assert boundaries[-1] == size
    assert micro_batch.max_seqlen == max(b - a for a, b in itertools.pairwise(boundaries))
    for sequence, start in zip(sequences, boundaries, strict=False):
        inside = slice(start, start + len(sequence))
        assert micro_batch.tokens[0, inside].tolist() == sequence
        assert micro_batch.position_ids[0, inside].tolist() == list(range(len(sequence)))
        assert micro_batch.labels[0, inside].tolist() == [*sequence[1:], 0]
        assert micro_batch.fields["value"][inside].tolist() == [*(-token for token in sequence[1:]), 0]
        assert micro_batch.targets[inside].tolist() == [True] * (len(sequence) - 1) + [False]
    assert not micro_batch.targets[sum(lengths) :].any()


@deterministic
@given(lengths_of_sequences, st.integers(1, 4))
def test_unpack_returns_what_pack_shifted(lengths, align) -> None:
    batch = ragged(lengths)
    micro_batch = pack(batch, range(len(lengths)), align)
    poisoned = micro_batch.fields["value"].masked_fill(~micro_batch.targets, float("nan"))
    expected = batch.fields["value"].clone()
    expected[batch.lengths.cumsum(0) - batch.lengths] = 0
    assert torch.equal(unpack(poisoned, micro_batch), expected)


@pytest.mark.parametrize("align", [1, 2, 8])
def test_no_sequences_give_padding_alone(align: int) -> None:
    micro_batch = pack(ragged([3, 2]), [], align)
    assert micro_batch.tokens.tolist() == [[0] * align]
    assert micro_batch.cu_seqlens.tolist() == [0, align]
    assert micro_batch.max_seqlen == align
    assert not micro_batch.targets.any()
    assert len(unpack(torch.ones(align), micro_batch)) == 0


def test_not_a_number_outside_the_targets_does_not_enter() -> None:
    batch = RaggedBatch(torch.tensor([1, 2]), torch.tensor([1, 1]), {"value": torch.full((2,), float("nan"))})
    assert pack(batch, [0, 1]).fields["value"].tolist() == [0, 0]


@deterministic
@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(1, 4),
    st.integers(50, 120),
    st.integers(1, 3),
    st.sampled_from([math.inf, 200.0, 10.0]),
)
def test_assign_keeps_its_promises(lengths, ranks, max_tokens, multiple, attention) -> None:
    assigned = assign(lengths, ranks, max_tokens, count_multiple=multiple, attention_length=attention)
    assert len(assigned) == ranks
    assert len({len(micro_batches) for micro_batches in assigned}) == 1
    assert len(assigned[0]) % multiple == 0
    everything = [index for rank in assigned for micro_batch in rank for index in micro_batch]
    assert sorted(everything) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in micro_batch) for rank in assigned for micro_batch in rank]
    assert max(loads) <= max_tokens
    again = assign(torch.tensor(lengths, dtype=torch.long), ranks, max_tokens, 1, multiple, attention)
    assert assigned == again
    if attention == math.inf:
        # Graham's bound for list scheduling: the heaviest exceeds the mean by less than the longest sequence.
        assert max(loads) <= sum(loads) / len(loads) + max(lengths, default=0)


@deterministic
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.5, 1.0, 2.0, 3.5])), max_size=20),
    st.integers(1, 8),
    st.integers(20, 50),
)
def test_each_goes_to_the_first_of_the_cheapest_bins_that_have_room(items, count, room) -> None:
    sizes, costs = [size for size, _ in items], [cost for _, cost in items]
    order = costliest_first(costs)
    expected: list[list[int]] | None = [[] for _ in range(count)]
    for index in order:
        have_room = [each for each in expected if sum(sizes[other] for other in each) + sizes[index] <= room]
        if not have_room:
            expected = None
            break
        min(have_room, key=lambda each: sum(costs[other] for other in each)).append(index)
    assert fill_bins(sizes, costs, order, count, room) == expected


def test_long_sequences_count_for_their_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (6000 * torch.randn(8192, generator=generator).exp()).long().clamp(16, 32768)
    costs = lengths + lengths**2 / 28_000

    def unevenness(cut: list[list[list[int]]]) -> tuple[float, float]:
        """The slowest rank, and all ranks where each micro-batch takes as long as the slowest of it, over the mean."""
        of_each = torch.tensor([[float(costs[members].sum()) for members in rank] for rank in cut])
        mean = of_each.sum(1).mean()
        return float(of_each.sum(1).max() / mean), float(of_each.amax(0).sum() / mean)

    slowest, together = unevenness(assign(lengths, 64, 32768, attention_length=28_000))
    assert slowest < 1.05
    assert together < 1.05
    assert unevenness(assign(lengths, 64, 32768))[1] > 1.2


def test_assign_uses_no_more_micro_batches_than_needed_and_balances_them() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 2000, (8192,), generator=generator)
    assigned = assign(lengths, 8, 16384)
    loads = torch.tensor([[int(lengths[micro_batch].sum()) for micro_batch in rank] for rank in assigned])
    fewest = -(-int(lengths.sum()) // (8 * 16384))
    assert loads.shape[1] <= fewest + 1
    assert loads.max() - loads.min() < 0.01 * loads.max()
    assert loads.sum(1).max() - loads.sum(1).min() < 0.01 * loads.sum(1).max()


def test_the_fewest_micro_batches_are_found_where_the_token_count_alone_promises_less() -> None:
    assert len(assign([6] * 20 + [1] * 4, 1, max_tokens=10)[0]) == 20


def test_micro_batches_that_meet_have_similar_loads() -> None:
    assert assign([9, 8, 5, 4], 2, max_tokens=9) == [[[0], [3]], [[1], [2]]]


def test_fewer_sequences_than_ranks_leave_empty_micro_batches() -> None:
    assert sorted(assign([4, 4], 3, 10)) == [[[]], [[0]], [[1]]]
    assert assign([], 2, 10) == [[[]], [[]]]


def test_interleaved_pipeline_stages_get_whole_groups_of_micro_batches_also_where_few_are_left() -> None:
    assert [len(rank) for rank in assign([5] * 5, 1, 10, count_multiple=4)] == [4]
    assert sorted(assign([4], 2, 10, count_multiple=2)) == [[[], []], [[0], []]]
    assert assign([], 1, 10, count_multiple=2) == [[[], []]]


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_its_length() -> None:
    with pytest.raises(UserError, match="11 tokens"):
        assign([3, 11], 1, 10)
    with pytest.raises(UserError, match="2 sequences that belong together, of 11 tokens"):
        assign([3, 1, 5, 6], 1, 10, unit=2)


@deterministic
@given(st.lists(st.integers(1, 20), max_size=20).filter(lambda lengths: len(lengths) % 2 == 0), st.integers(1, 3))
def test_units_stay_together_and_in_order(lengths: list[int], ranks: int) -> None:
    for micro_batch in (members for rank in assign(lengths, ranks, 50, unit=2) for members in rank):
        pairs = [(micro_batch[i], micro_batch[i + 1]) for i in range(0, len(micro_batch), 2)]
        assert all(first % 2 == 0 and second == first + 1 for first, second in pairs)


@deterministic
@given(lengths_of_sequences, st.randoms(use_true_random=False))
def test_select(lengths, random) -> None:
    batch = ragged(lengths)
    order = random.sample(range(len(lengths)), len(lengths))
    parts = batch.tokens.split(lengths)
    selected = batch.select(order)
    assert selected.tokens.tolist() == [token for index in order for token in parts[index].tolist()]
    assert selected.fields["value"].tolist() == [-token for index in order for token in parts[index].tolist()]


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        RaggedBatch(torch.arange(3), torch.tensor([3]), {"weight": torch.zeros(2)})
    with pytest.raises(ValueError, match="tokens"):
        RaggedBatch(torch.arange(3), torch.tensor([2]))
    with pytest.raises(ValueError, match="at least one token"):
        RaggedBatch(torch.arange(3), torch.tensor([3, 0]))


@pytest.mark.parametrize("sequences", [0, 1, 3, 7])
def test_interleaved_stages_of_a_trainer_are_given_whole_groups(sequences: int) -> None:
    sizes = ParallelSizes(world_size=8, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    cut = cut_batch(Batch.of(ragged([5] * sequences)), MegatronOptions(sizes, torch.float32), max_tokens=5)
    assert [len(share) for share in cut] == [4, 4]


@deterministic
@given(lengths_of_sequences, st.integers(1, 3), st.integers(9, 30), st.integers(1, 3))
def test_what_the_ranks_say_of_their_shares_comes_back_at_the_tokens(lengths, ranks, max_tokens, steps) -> None:
    batch, options = ragged(lengths), MegatronOptions(ParallelSizes(world_size=ranks), torch.float32)
    cut = cut_batch(Batch.of(batch), options, max_tokens)
    shares = [share_of(Batch.of(batch), each) for each in cut]
    for (share, micro_batches), sequences in zip(shares, cut, strict=True):
        tokens = share.load().tokens.split(share.lengths.tolist())
        packed = [[tokens[i].tolist() for i in each] for each in micro_batches]
        assert packed == [[batch.tokens.split(lengths)[i].tolist() for i in each] for each in sequences]
    if lengths:
        kept = [share.kept(share.load().fields["value"]) for share, _ in shares]
        assert torch.equal(fetch_tensor(in_order(cut, kept)), batch.fields["value"])
    # A rank reads in each mini-batch what it has seen before, in the same micro-batches.
    whole = replace(Batch.of(batch), mini_batch_of_sequence=np.arange(len(lengths)) * steps // max(len(lengths), 1))
    of_ranks: list[list[list[int]]] = [[] for _ in range(ranks)]
    for sequences in whole.sequences_by_mini_batch():
        for share, micro_batches in zip(of_ranks, cut_batch(whole.select(sequences), options, max_tokens), strict=True):
            share.extend([sequences[i] for i in each] for each in micro_batches)
    assert cut_batch(whole, options, max_tokens) == of_ranks


def test_the_same_sequences_are_dealt_once(monkeypatch) -> None:
    dealt: list[int] = []

    def counted(lengths, *others) -> Cut:
        dealt.append(len(lengths))
        return assign(lengths, *others)

    monkeypatch.setattr(cuts, "assign", counted)
    options = MegatronOptions(ParallelSizes(world_size=2), torch.float32)
    cutter, batch = cuts.Cutter(options, max_tokens=9), Batch.of(ragged([3, 5, 2, 4]))
    several = replace(batch, mini_batch_of_sequence=np.array([0, 0, 1, 1]))
    same, others = [batch.only(()), batch.select([0, 1, 2, 3])], [several, replace(several, unit=2)]
    asked = [batch, *same, batch.select([1, 0, 2]), batch, *others]
    of_each = [cutter.cut(each, math.inf) for each in asked]
    assert dealt == [4, 3, 2, 2, 2, 2]
    assert of_each == [cut_batch(each, options, 9) for each in asked]
