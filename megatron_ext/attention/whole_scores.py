"""Attention by whole score matrices: on a CPU, short sequences take a third of the time of a tiled kernel.

Scores are recomputed in the backward pass, as tiled kernels do, so nothing quadratic in the length is kept in between.
Shapes are `query` [N, Q, heads, width], `key` [N, K, groups, width] and `value` [N, K, groups, v_width], with heads a
multiple of groups; all is computed in float32 or better.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Scores of queries to keys: times `scale`, and where `is_causal` of each token to itself and those before it."""

    scale: float
    is_causal: bool = True


def attend_by_whole_scores(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, [N, Q, heads, v_width]."""
    output: Tensor = _WholeScores.apply(query, key, value, Scores(scale))
    return output


def forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the output [N, Q, heads, v_width] and each query's log-sum-exp [N, Q, heads]; not differentiable."""
    found = _scores(query, key, scores)
    weights = found.softmax(-1)
    # The largest weight is exp(largest score) / sum.
    total = found.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    groups = key.shape[2]
    return _heads(weights @ _columns(value), query, groups), _heads(total, query.to(total.dtype), groups)[..., 0]


def backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, output: Tensor, total: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, for that of the output.

    `output` and `total`, the log-sum-exps, may cover more keys than these; the result is then these keys' part.
    """
    weights = _scores(query, key, scores).sub_(_rows(total[..., None], key.shape[2])).exp_()
    return _gradients(query, key, value, weights, gradient, output, scores.scale)


class _WholeScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        weights = _scores(query, key, scores).softmax(-1)
        output = _heads(weights @ _columns(value), query, key.shape[2])
        ctx.scores = scores
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output = ctx.saved_tensors
        weights = _scores(query, key, ctx.scores).softmax(-1)
        return *_gradients(query, key, value, weights, gradient, output, ctx.scores.scale), None


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor, gradient: Tensor, output: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = key.shape[2]
    of_output = _rows(gradient, groups)
    of_value = _keys(weights.mT @ of_output, value)
    # Softmax: a score's gradient is its weight times (the weight's gradient - the row's weighted mean of these).
    mean = (of_output * _rows(output, groups)).sum(-1, keepdim=True)
    of_scores = (of_output @ _columns(value).mT).sub_(mean).mul_(weights).mul_(scale)
    of_query = _heads(of_scores @ _columns(key), query, groups)
    return of_query, _keys(of_scores.mT @ _rows(query, groups), key), of_value


def _scores(query: Tensor, key: Tensor, scores: Scores) -> Tensor:
    """[N * groups, heads / groups * Q, K]."""
    rows, columns = _rows(query, key.shape[2]), _columns(key)
    if not scores.is_causal:
        return torch.baddbmm(rows.new_empty(1), rows, columns.mT, beta=0, alpha=scores.scale)
    length = query.shape[1]
    mask = rows.new_full((length, length), -math.inf).triu_(1).repeat(rows.shape[1] // max(length, 1), 1)
    return torch.baddbmm(mask, rows, columns.mT, alpha=scores.scale)


def _rows(heads: Tensor, groups: int) -> Tensor:
    """[N, Q, heads, width] as [N * groups, heads / groups * Q, width]: heads that share keys are rows of one matrix.

    So no key is repeated.
    """
    by_group = heads.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    return _precise(by_group).reshape(len(heads) * groups, -1, heads.shape[-1])


def _heads(rows: Tensor, query: Tensor, groups: int) -> Tensor:
    """The inverse of `_rows`, in the dtype of `query`."""
    by_group = rows.view(len(query), groups, -1, query.shape[1], rows.shape[-1])
    return by_group.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)


def _columns(keys: Tensor) -> Tensor:
    """[N, K, groups, width] as [N * groups, K, width]."""
    return _precise(keys.transpose(1, 2)).flatten(0, 1)


def _keys(columns: Tensor, key: Tensor) -> Tensor:
    """The inverse of `_columns`, in the dtype of `key`."""
    return columns.view(len(key), key.shape[2], *columns.shape[1:]).transpose(1, 2).to(key.dtype)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
