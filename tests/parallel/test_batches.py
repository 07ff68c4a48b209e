"""Wherever prefixes are shared, the ranks of every layout have some that are."""

import torch
from batches import bare_batch, deal, prefixes_of
from combinations import KINDS, layouts

from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.balance import computed


def test_every_rank_of_a_layout_that_shares_prefixes_computes_some_tokens_once() -> None:
    batch = bare_batch(shared_prefixes=True)
    lengths, prefixes = batch.lengths.tolist(), prefixes_of(batch)
    shared = [kind for kind in KINDS.values() if kind.shared_prefixes]
    ways = {
        (each.sizes.data_parallel_size, MegatronOptions(each.sizes, torch.float32).micro_batch_multiple): each.sizes
        for kind in shared
        for each in layouts(kind)
    }
    assert len(ways) > 10
    for (_, multiple), sizes in ways.items():
        cut = deal(batch, sizes, multiple, shared_prefixes=True)
        for rank in cut:
            whole = sum(lengths[index] for micro_batch in rank for index in micro_batch)
            assert computed([rank], lengths, prefixes).tokens < 0.8 * whole, str(sizes)
