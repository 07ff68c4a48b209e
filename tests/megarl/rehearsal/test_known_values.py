"""Whole numbers have values in a world without them, memory is counted while it is there, and experts take turns."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megarl.rehearsal.alive import Alive
from megarl.rehearsal.known_values import KnownValues


def test_what_follows_from_constants_is_known() -> None:
    with FakeTensorMode(), KnownValues():
        bounds = torch.tensor([3, 4]).cumsum(0)
        assert bounds.tolist() == [3, 7]
        bounds += 1
        assert bounds.tolist() == [4, 8]
        bounds.copy_(torch.empty(2))
        with pytest.raises(DataDependentOutputException):
            bounds.tolist()


def test_a_mask_says_how_much_it_takes_of_what_has_no_values() -> None:
    with FakeTensorMode(), KnownValues():
        values = torch.empty(2, 3, 5)
        mask = torch.tensor([[True, False, True], [False, False, True]])
        assert values[mask].shape == (3, 5)
        assert torch.empty(2, 3).masked_select(mask).shape == (3,)


def test_all_experts_get_as_many_tokens() -> None:
    with FakeTensorMode(), KnownValues():
        logits = torch.empty(8, 6)
        chosen = logits.topk(3).indices
        routing = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
        assert routing.sum(0).tolist() == [4] * 6
        assert routing.sum(1).tolist() == [3] * 8


def test_memory_counts_once_and_until_its_last_view_is_gone() -> None:
    with FakeTensorMode():
        before = torch.empty(1000)
        with Alive() as alive:
            doubled = before * 2
            row = doubled.view(10, 100)[3]
            assert alive.nbytes == 4000
            del doubled
            assert alive.nbytes == 4000
            del row
            assert (alive.nbytes, alive.peak) == (0, 4000)
            before.add_(1)
            assert alive.peak == 4000


def test_memory_that_a_backward_pass_needs_is_there_until_then() -> None:
    with FakeTensorMode():
        weight = torch.empty(100, requires_grad=True)
        with Alive() as alive:
            total = (weight.exp() * 2).sum()
            assert alive.nbytes == 404
            total.backward()
            del total
            assert alive.nbytes == 400  # the gradient
