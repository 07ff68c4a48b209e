"""The controller counts what the ranks compute: pairs, prefixes of two depths, tokens that are away."""

import numpy as np
import torch

from converters.layouts.megatron import ParallelSizes
from megarl.cluster.trainer.batch import Batch
from megarl.cluster.trainer.cuts import cut_batch
from megarl.cluster.trainer.prefixes import prefixes_of
from megarl.data.stretches import StoredArray
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.balance import computed
from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.packing.shared_prefixes import share


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_what_is_away_is_the_same_where_it_is_of_the_same_array() -> None:
    def away(array_name: str, length: int, start: int = 0) -> StoredArray:
        return StoredArray(array_name, "<i4", length, is_finite=True, start=start)

    sequences = [
        (array(5, 6), away("a", 40), array(7, 8)),
        (array(5, 6), away("b", 40), array(7, 8)),
        (array(5), array(6), away("a", 40), array(7, 9)),
        (array(5, 6), away("a", 30), array(1)),
        (array(5, 6), away("b", 40, start=1)),
        (array(5, 6, 7),),
        (array(1),),
    ]
    prefixes = prefixes_of(sequences)
    for one, common in enumerate(([44, 2, 43, 32, 2, 2, 0], [2, 44, 2, 2, 2, 2, 0], [43, 2, 44, 32, 2, 2, 0])):
        for other, expected in enumerate(common):
            if one != other:
                assert prefixes.select([one, other]).common.tolist() == [0, expected]


def test_pairs_and_prompts_are_cut_by_what_is_computed_of_them() -> None:
    system, prompt = list(range(40)), list(range(100, 130))
    own = iter(range(200, 300))
    pairs = [[*system, *[next(own)] * 5] for _ in range(4)]
    responses = [[*system, *prompt, *[next(own)] * 5] for _ in range(4)]
    for sequences, unit, max_tokens, expected in ((pairs, 2, 50, 100), (responses, 1, 90, 90)):
        tokens = torch.tensor([token for each in sequences for token in each])
        batch = RaggedBatch(tokens, torch.tensor([len(each) for each in sequences]), unit=unit)
        options = MegatronOptions(ParallelSizes(), torch.float32, shared_prefixes=True)
        cut = cut_batch(Batch.of(batch), options, max_tokens)
        parts = [share(pack(batch, members), 1).tokens.shape[1] for members in cut[0]]
        assert max(parts) <= max_tokens
        assert sum(parts) == expected
        assert computed(cut, batch.lengths.tolist(), prefixes_of(Batch.of(batch).tokens)).tokens == expected
