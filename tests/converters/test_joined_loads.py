"""Tensors that a loader joins before it puts them into parameters, or keeps until others come."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_configs import count_up
from traced_loads import check_against_load, empty, refuse, run

from converters.boxes import Box


@given(st.data())
def test_any_loader_that_joins_tensors_and_cuts_what_it_has_joined(data):
    """Views of two to four tensors joined along rows or columns, of which boxes go into parameters."""
    dimension = data.draw(st.integers(0, 1), "dimension")
    across = data.draw(st.integers(1, 3), "across")
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=2, max_size=4), "parts")
    steps = data.draw(st.lists(st.sampled_from(["clone", "wide", "cut", "detach"]), max_size=3), "steps")
    total = sum(length for _, length in lengths)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, total - 1)), max_size=2), "cuts") - {total})

    def shape(length):
        return (length, across) if dimension == 0 else (across, length)

    hf = count_up({f"w{i}": shape(before + length) for i, (before, length) in enumerate(lengths)})
    bounds = list(zip([0, *cuts], [*cuts, total], strict=True))

    def load(parameters, weights):
        tensors = [tensor for _, tensor in weights]
        parts = [tensor.narrow(dimension, *cut) for tensor, cut in zip(tensors, lengths, strict=True)]
        joined = torch.cat(parts, dimension - 2 * (len(parts) % 2))
        for step in steps:
            if step == "cut":
                joined = joined[:, :] if dimension == 0 else joined[...]
            else:
                joined = {"clone": joined.clone, "detach": joined.detach, "wide": joined.double}[step]()
        for i, (start, stop) in enumerate(bounds):
            part = joined.narrow(dimension, start, stop - start)
            parameters[f"p{i}"].copy_(part.clone() if i % 2 else part)

    parameters = {f"p{i}": empty(*shape(stop - start)) for i, (start, stop) in enumerate(bounds)}
    check_against_load(load, parameters, hf)


@pytest.mark.parametrize(
    ("join", "rows", "excluded", "reason"),
    [
        (lambda a, b, c: torch.cat([a, b, c]), 5, {"abc": "it is packed"}, "puts it into abc, and it is packed"),
        (lambda a, b, c: torch.cat([a, b, c[::2]]), 4, {}, "takes a part of it that is not a box"),
        (lambda a, b, c: torch.cat([torch.cat([a, b]), c]), 5, {}, "joins it with others, and computes"),
        (lambda a, b, c: torch.cat([a, b, c])[:1], 5, {}, "joins it with others, and copies them into another"),
    ],
)
def test_tensors_that_are_joined_are_traced_together_or_not_at_all(join, rows, excluded, reason):
    def load(parameters, weights):
        kept = {}
        for name, tensor in weights:
            kept[name] = tensor
            if len(kept) == 3:
                parameters["abc"].copy_(join(**kept))

    hf = count_up({"a": (1, 3), "b": (1, 3), "c": (3, 3)})
    trace = run(load, {"abc": empty(rows, 3)}, hf, excluded=excluded)
    assert trace.shard.placements == []
    assert set(trace.untraced) == {"a", "b", "c"}
    assert all(each.startswith(f"the engine's loader {reason}") for each in trace.untraced.values())


@pytest.mark.parametrize("between", ["", "w"])
def test_a_loader_that_waits_for_another_tensor_gets_it_in_one_call(between):
    """Also where one that it refuses came between the two."""

    def load(parameters, weights):
        kept = {}
        for name, tensor in weights:
            if name == "w":
                refuse(parameters, tensor)
            kept[name] = tensor
            if {"a", "b"} <= kept.keys():
                parameters["ab"].copy_(torch.cat([kept.pop("a"), kept.pop("b")]))

    hf = count_up({"a": (2, 3)} | ({between: (4, 4)} if between else {}) | {"b": (1, 3)})
    trace = run(load, {"ab": empty(3, 3), "w": empty(5)}, hf)
    assert set(trace.untraced) == ({between} - {""})
    assert {placement.hf_name: placement.local_box for placement in trace.shard.placements} == {
        "a": Box((0, 0), (2, 3)), "b": Box((2, 0), (3, 3))
    }  # fmt: skip
