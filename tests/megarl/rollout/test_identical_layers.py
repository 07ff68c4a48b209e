"""Layers that are identical: which are, and that what differs in anything is not."""

from typing import Any

import pytest
import torch
from torch import nn

from megarl.rollout.identical_layers import group_identical_layers, tensors_of_layers


class Odd(nn.Linear):
    """As a linear layer, of another type."""


def model(*layers: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.layers = nn.ModuleList(nn.Sequential(each) for each in layers)
    holder.head = nn.Linear(2, 2)
    return holder


def identical(built: nn.Module, reason: Any = lambda _module: None, **changed: torch.dtype) -> dict[int, list[int]]:
    parameters = dict(built.named_parameters())
    shapes = {f"model.{name}": tuple(each.shape) for name, each in parameters.items()}
    dtypes = dict.fromkeys(shapes, torch.float32) | {
        f"model.layers.{number.removeprefix('layer_')}.0.weight": dtype for number, dtype in changed.items()
    }
    return group_identical_layers(built, parameters, reason, shapes, dtypes)


def test_layers_of_equal_modules_are_identical() -> None:
    built = model(nn.Linear(2, 3), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    assert identical(built) == {0: [0, 3], 1: [1, 2]}
    kept = tensors_of_layers(dict(built.named_parameters()), [0])
    assert set(kept) == {"layers.0.0.weight", "layers.0.0.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("built", "options"),
    [
        (model(nn.Linear(2, 2), Odd(2, 2)), {}),
        (model(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), {}),
        (model(nn.Linear(2, 2), nn.Linear(2, 2)), {"layer_1": torch.bfloat16}),
        (model(nn.Linear(2, 2), nn.Linear(2, 2).double()), {}),
    ],
)
def test_layers_that_differ_are_not(built: nn.Module, options: dict[str, torch.dtype]) -> None:
    assert identical(built, **options) == {0: [0], 1: [1]}


def test_layers_of_which_one_may_not_be_written_are_not_identical() -> None:
    built = model(nn.Linear(2, 2), nn.Linear(2, 2))
    packed = built.layers[1][0]
    assert identical(built, lambda module: "packed" if module is packed else None) == {0: [0], 1: [1]}
