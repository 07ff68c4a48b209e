"""Program: let SGLang's own layers load their parts of tensors whose elements are the numbers of their rows, from 1.

It runs in the environment that has SGLang: `python cut_in_sglang.py FOLDER`, which has `given.pt`: a list of
(number of workers, query heads, heads of keys, rows of a head, size of the vocabulary). `made.pt` then has for each of
them, by worker, the rows of query, key, value and embedding, 0 for one that fills up.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from megarl.rollout.sglang import cpu

cpu.corrections.install()

from sglang.srt.layers import linear, vocab_parallel_embedding  # noqa: E402 (what they need is above)


def rows(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float32)[:, None]


def loaded(worker: int, workers: int, heads: int, groups: int, head_dim: int, vocabulary: int) -> list[torch.Tensor]:
    place = SimpleNamespace(tp_group=None, tp_size=workers, tp_rank=worker, attn_tp_size=workers, attn_tp_rank=worker)
    with (
        mock.patch.object(linear, "get_parallel", return_value=place),
        mock.patch.object(vocab_parallel_embedding, "get_parallel", return_value=place),
    ):
        attention = linear.QKVParallelLinear(1, head_dim, heads, groups, bias=False, params_dtype=torch.float32)
        embedding = vocab_parallel_embedding.VocabParallelEmbedding(vocabulary, 1, params_dtype=torch.float32)
        sizes = [attention._get_shard_size_mapping(name) for name in "qkv"]
        for name, count in zip("qkv", (heads, groups, groups), strict=True):
            attention.weight.weight_loader(attention.weight, rows(count * head_dim), name)
        embedding.weight.weight_loader(embedding.weight, rows(vocabulary))
    return [part[:, 0].clone() for part in (*attention.weight.data.split(sizes), embedding.weight.data)]


folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt")
torch.save([[loaded(worker, *case) for worker in range(case[0])] for case in given], folder / "made.pt")
