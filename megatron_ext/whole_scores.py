"""Causal attention by whole matrices of scores: on a CPU, short sequences take a third of the time of small tiles.

The scores are made again on the way back, as a kernel in tiles does: nothing quadratic in the length stays in between.
"""

import math
from typing import Any

import torch
from torch import Tensor


def attend_by_whole_scores(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    """Each token looks at itself and at those before it; in float32 or better.

    `query` [N, T, heads, width], `key` [N, T, groups, width], `value` [N, T, groups, v_width] with heads a multiple of
    groups. Returns [N, T, heads, v_width].
    """
    output: Tensor = _WholeScores.apply(query, key, value, softmax_scale)
    return output


class _WholeScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups = key.shape[2]
        rows, columns, values = _rows(query, groups), _columns(key), _columns(value)
        output = _heads(_weights(rows, columns, query.shape[1], scale) @ values, query, groups)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output = ctx.saved_tensors
        groups = key.shape[2]
        rows, columns, values = _rows(query, groups), _columns(key), _columns(value)
        of_rows = _rows(gradient, groups)
        weights = _weights(rows, columns, query.shape[1], ctx.scale)
        of_values = weights.mT @ of_rows
        # Softmax: the gradient of a score is its weight times how much that of the weight is above the row's mean.
        mean = (of_rows * _rows(output, groups)).sum(-1, keepdim=True)
        of_scores = (of_rows @ values.mT).sub_(mean).mul_(weights).mul_(ctx.scale)
        of_query = _heads(of_scores @ columns, query, groups)
        of_key = (of_scores.mT @ rows).view(*_columns_shape(key)).transpose(1, 2).to(key.dtype)
        return of_query, of_key, of_values.view(*_columns_shape(value)).transpose(1, 2).to(value.dtype), None


def _weights(rows: Tensor, columns: Tensor, length: int, scale: float) -> Tensor:
    mask = rows.new_full((length, length), -math.inf).triu_(1).repeat(rows.shape[1] // max(length, 1), 1)
    return torch.baddbmm(mask, rows, columns.mT, alpha=scale).softmax(-1)


def _rows(heads: Tensor, groups: int) -> Tensor:
    """[N, T, heads, width] as [N * groups, heads / groups * T, width]: heads that share keys are more rows of a matrix.

    So no key is repeated.
    """
    by_group = heads.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    return _precise(by_group).reshape(len(heads) * groups, -1, heads.shape[-1])


def _columns(heads: Tensor) -> Tensor:
    """[N, T, groups, width] as [N * groups, T, width]."""
    return _precise(heads.transpose(1, 2)).flatten(0, 1)


def _columns_shape(heads: Tensor) -> tuple[int, int, int, int]:
    sequences, length, groups, width = heads.shape
    return sequences, groups, length, width


def _heads(rows: Tensor, query: Tensor, groups: int) -> Tensor:
    """The opposite of `_rows`, in the type of `query`."""
    sequences, length, _, _ = query.shape
    by_group = rows.view(sequences, groups, -1, length, rows.shape[-1])
    return by_group.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
