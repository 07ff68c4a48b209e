"""Traced layouts, against what the same loaders do with real values."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_configs import count_up
from traced_loads import check_against_load, empty, refuse, run

from converters.boxes import Box
from converters.errors import UserError
from converters.layout import Shard
from converters.layouts.load_tracer import LoadTracer, UntraceableError
from converters.layouts.traced_layout import PackedTrace, local_tensors, trace_loading, traced_layout, untraced


def load_sharded(rank, parameters, weights):
    """A loader as engines have them: rows and columns of two ranks, fused, stacked, replicated and padded tensors."""
    for name, tensor in weights:
        if name in ("q", "k"):
            rows = tensor.shape[0] // 2
            start = {"q": 0, "k": 4}[name]
            parameters["qk"].data.narrow(0, start, rows).copy_(tensor.narrow(0, rank * rows, rows))
        elif name == "o":
            parameters["o"].copy_(tensor.chunk(2, dim=1)[rank])
        elif name.startswith("expert"):
            expert = int(name[-1])
            if expert // 2 == rank:
                parameters["experts"].data[expert % 2].copy_(tensor.detach())
        elif name == "vocabulary":
            part = tensor[min(4 * rank, 6) : min(4 * rank + 4, 6)]
            parameters["vocabulary"][: part.shape[0]].copy_(part)
            parameters["vocabulary"][part.shape[0] :].data.fill_(0)
        elif name == "heads":
            parameters["heads"].view(2, 3, 2).copy_(tensor.view(4, 3, 2)[2 * rank : 2 * rank + 2])
        elif name == "scale":
            parameters["scales"][1 - rank] = tensor
            parameters["scales"][rank].fill_(1)
        elif name == "norm":
            parameters["norm"].copy_(tensor.clone().to(torch.float32))


def hf_tensors():
    shapes = {"q": (8, 3), "k": (4, 3), "o": (5, 6), "vocabulary": (6, 2), "heads": (12, 2), "scale": (), "norm": (5,)}
    return count_up(shapes | {f"expert{i}": (2, 3) for i in range(4)})


def sharded_parameters():
    shapes = {"qk": (6, 3), "o": (5, 3), "experts": (2, 2, 3), "vocabulary": (4, 2), "heads": (6, 2)}
    return {name: empty(*shape) for name, shape in (shapes | {"scales": (2,), "norm": (5,)}).items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_sharded_loader(device):
    hf = hf_tensors()
    hf["norm"] = hf["norm"].bfloat16()
    traces = []
    for rank in range(2):
        load = partial(load_sharded, rank)
        traces.append(check_against_load(load, sharded_parameters(), hf))
        if device == "meta":
            on_meta = {name: tensor.to("meta") for name, tensor in sharded_parameters().items()}
            shapes = {name: tuple(tensor.shape) for name, tensor in hf.items()}
            dtypes = {name: tensor.dtype for name, tensor in hf.items()}
            assert trace_loading(partial(load, on_meta), on_meta, shapes, dtypes) == traces[rank]
    shards = [trace.shard for trace in traces]
    assert {name for name in shards[0].local_shapes if "[" in name} == {
        "experts[0]", "experts[1]", "scales[0]", "scales[1]"
    }  # fmt: skip
    assert shards[1].padding == [("vocabulary", Box((2, 0), (4, 2))), ("scales[1]", Box((), ()))]
    shapes = {name: tuple(tensor.shape) for name, tensor in hf.items()}
    layout = traced_layout(shards, shapes)
    assert layout.ranks == 2
    assert layout.shard(1) == shards[1]


def packed_trace():
    parameters, hf = sharded_parameters(), hf_tensors()
    return PackedTrace.of(run(partial(load_sharded, 1), parameters, hf | {"surplus": torch.ones(3)}))


@pytest.mark.long
def test_processes_that_trace_the_same_pack_the_same_bytes():
    program = "from test_traced_layout import packed_trace; print(packed_trace().pickled.hex())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    other = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert bytes.fromhex(other) == packed_trace().pickled
    assert PackedTrace(bytes.fromhex(other)).unpacked() == packed_trace().unpacked()


@given(st.data())
def test_any_loader_that_cuts_and_joins(data):
    """Parameters made of pieces of HuggingFace tensors, each piece through views and copies of some kind."""
    columns = data.draw(st.integers(1, 3))
    plan = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["plain", "clone", "flat", "rows", "selected", "wide"]),
                st.integers(0, 3),
                st.integers(1, 3),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=4,
        )
    )
    hf = count_up({f"w{i}": (before + rows + after, columns) for i, (_, before, rows, after) in enumerate(plan)})

    def load(parameters, weights):
        position = 0
        for (_, tensor), (way, before, rows, _) in zip(weights, plan, strict=True):
            destination = parameters["p"].data[position : position + rows]
            position += rows
            part = tensor.narrow(0, before, rows)
            if way == "clone":
                tensor = tensor.clone()[before:]
                destination.copy_(tensor[:rows])
            elif way == "flat":
                destination.view(-1).copy_(part.reshape(-1))
            elif way == "rows":
                for i in range(rows):
                    destination[i] = part[i].clone()
            elif way == "selected":
                destination.unsqueeze(0).copy_(part.clone()[None])
            elif way == "wide":
                destination.copy_(part.to(torch.float64))
            else:
                destination.copy_(part)

    check_against_load(load, {"p": empty(sum(rows for _, _, rows, _ in plan), columns)}, hf)


def test_a_loader_goes_on_behind_what_cannot_be_noted():
    """So that a model with thousands of experts that the kernel packs is traced in one call, not in thousands."""
    hf = count_up({f"expert{i}": (2, 3) for i in range(50)} | {"norm": (5,)})
    calls = []

    def load(parameters, weights):
        calls.append(None)
        for name, tensor in weights:
            if name == "norm":
                parameters["norm"].copy_(tensor)
            else:
                parameters["experts"].data[int(name.removeprefix("expert"))].copy_(tensor)

    trace = run(load, {"experts": empty(50, 2, 3), "norm": empty(5)}, hf, excluded={"experts": "it is packed"})
    assert set(trace.untraced) == {name for name in hf if name != "norm"}
    assert [placement.hf_name for placement in trace.shard.placements] == ["norm"]
    assert len(calls) == 1


def test_a_loader_with_threads_writes_nothing():
    """Also where it is given values, to see whether it refuses them."""

    def load(parameters, weights):
        with ThreadPoolExecutor(1) as pool:
            for name, tensor in weights:
                if name == "w":
                    needs_values(tensor)
                assert pool.submit(parameters[name].copy_, tensor).result() is parameters[name]

    trace = run(load, {"a": empty(2), "w": empty(4, 4)}, count_up({"a": (2,), "w": (4, 4)}))
    assert trace.untraced == {"w": "the engine's loader refuses it: ValueError: no values"}
    assert trace.refused == {}
    assert [placement.hf_name for placement in trace.shard.placements] == ["a"]


def by_name(**ways):
    """A loader that has a way for each tensor, and copies the others whole."""

    def load(parameters, weights):
        for name, tensor in weights:
            if name in ways:
                ways[name](parameters, tensor)
            else:
                parameters[name].copy_(tensor)

    return load


def needs_values(tensor):
    if tensor.is_meta:
        raise ValueError("no values")


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (lambda p, t: p["w"].copy_(t + 1), "computes with its values (aten.add.Tensor)"),
        (lambda p, t: p["w"].add_(t), "computes with its values (aten.add_.Tensor)"),
        (lambda p, t: p["w"].fill_(t[0, 0]), "computes with its values (aten.fill_.Tensor)"),
        (lambda p, t: p["w"].fill_(t[0, 0].item()), "computes with its values"),
        (lambda p, t: p["w"].copy_(torch.cat([t[2:], t[:2]])), None),
        (lambda p, t: p["w"].copy_(torch.cat([t[:2], torch.ones(2, 4)])), "joins it with what is not loaded"),
        (lambda p, t: p["w"].copy_(torch.cat([t[2:], t[:2]]) + 1), "joins it with others, and computes with their"),
        (lambda p, t: p["w"].copy_(torch.cat([t[2:], t[:2]]).t()), "joins it with others, and takes a part of them"),
        (lambda p, t: p["w"].copy_(torch.cat([t[0], t[1]])[:4]), "joins it with others, and copies them into another"),
        (lambda p, t: p["w"].copy_(torch.cat([t[2:], t[:2]]).half().float()), "casts it from torch.float32 to"),
        (lambda p, t: torch.empty(4, 4).copy_(torch.cat([t[2:], t[:2]])), "puts it into memory that is not one of the"),
        (lambda p, t: p["w"].index_copy_(0, torch.arange(4), t), "computes with its values"),
        (lambda p, t: torch.mul(t, 2, out=p["w"]), "computes with its values"),
        (lambda p, t: t.mul_(2), "computes with its values"),
        (lambda p, t: p["w"].copy_(t.t()), "takes a part of it that is not a box"),
        (lambda p, t: p["w"].copy_(t.t().contiguous()), "takes a part of it that is not"),
        (lambda p, t: p["w"][:2].copy_(t[::2]), "takes a part of it that is not a box"),
        (lambda p, t: p["w"].copy_(t.view(16)[2:6]), "takes a part of it that is not a box"),
        (lambda p, t: p["w"][::2].copy_(t[:2]), "scatters it over w"),
        (lambda p, t: p["w"].view(2, 8).copy_(t.view(2, 8)[:, :]), None),
        (lambda p, t: p["w"].view(16)[:4].copy_(t[1:2, :].view(4)), None),
        (lambda p, t: p["w"].view(16).copy_(t.view(16).clone()), "copies a part of it into another shape"),
        (lambda p, t: p["w"].view(torch.int32).copy_(t.view(torch.int32)), "computes with its values (aten.view.dty"),
        (lambda p, t: p["w"].view(torch.float64).copy_(t[:, :2]), "scatters it over w"),
        (lambda p, t: p["w"].copy_(t[0]), "changes its shape to put it into w"),
        (lambda p, t: p["w"][0].copy_(t[:, 0]), "changes its shape to put it into w"),
        (lambda p, t: p["w"].view(16).copy_(t.clone().view(16)), None),
        (lambda p, t: torch.empty(4, 4).copy_(t), "puts it into memory that is not one of the"),
        (lambda p, t: p["w"].copy_(t.half().float()), "casts it from torch.float32 to"),
        (lambda p, t: p["w"].copy_(t.to(torch.float8_e4m3fn)), "casts it from torch.float32"),
        (lambda p, t: p["int"].copy_(t), "casts it from torch.float32 to torch.int32"),
        (refuse, "refuses it: AssertionError: no such shape"),
        (lambda p, t: p["w"].narrow(0, 3, 4).copy_(t), "refuses it: RuntimeError"),
        (lambda p, t: needs_values(t), "refuses it: ValueError: no values"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_named_and_the_rest_goes_on(way, reason):
    parameters = {"a": empty(2), "w": empty(4, 4), "int": torch.zeros(4, 4, dtype=torch.int32), "z": empty(3)}
    hf = count_up({"a": (2,), "w": (4, 4), "z": (3,)})
    trace = run(by_name(w=way), parameters, hf)
    assert set(trace.untraced) == ({"w"} if reason else set())
    if reason:
        assert trace.untraced["w"].startswith(f"the engine's loader {reason}")
        # By name it might be loaded, unless the loader refuses it with values, too.
        is_refused = reason.startswith("refuses") and "no values" not in reason
        assert trace.refused == (trace.untraced if is_refused else {})
        assert untraced([trace, trace]) == trace.untraced
    names = list(dict.fromkeys(placement.hf_name for placement in trace.shard.placements))
    assert names == (["a", "z"] if reason else ["a", "w", "z"])


def test_a_tensor_that_is_copied_several_times_at_once():
    spread = by_name(v=lambda parameters, tensor: parameters["w"].copy_(tensor))
    trace = run(spread, {"w": empty(2, 3)}, count_up({"v": (3,)}))
    assert trace.untraced == {"v": "the engine's loader changes its shape to put it into w"}


def test_a_parameter_that_the_loader_changes_afterwards():
    def transformed(parameters, tensor):
        parameters["w"].copy_(tensor)
        parameters["w"].data.copy_(torch.exp(parameters["w"]))

    def overwritten(parameters, tensor):
        parameters["w"].copy_(tensor)
        parameters["w"][1:2].zero_()

    def doubled(parameters, tensor):
        parameters["w"].copy_(tensor)
        assert torch.mul(torch.ones(2, 2), 2, out=parameters["w"]) is parameters["w"]

    cases = {transformed: "changes w after", doubled: "changes w after", overwritten: "overwrites w with a constant"}
    for way, reason in cases.items():
        trace = run(by_name(w=way), {"w": empty(2, 2)}, count_up({"w": (2, 2)}))
        assert reason in trace.untraced["w"]
        assert trace.shard.placements == []


def test_a_constant_below_what_is_copied_later():
    def padded(parameters, tensor):
        parameters["w"].fill_(1)
        parameters["w"][1:3, :2].copy_(tensor)

    trace = check_against_load(by_name(w=padded), {"w": empty(4, 3)}, count_up({"w": (2, 2)}))
    assert sum(box.size for _, box in trace.shard.padding) == 8
    assert set(trace.padding_values) == {1}


def test_parameters_that_share_memory_or_have_a_layout_of_their_own():
    memory = empty(20)
    parameters = {"a": memory[:6].view(2, 3), "b": memory[6:18].view(3, 4), "t": empty(4, 3).t()}
    check_against_load(by_name(), parameters, count_up({"a": (2, 3), "b": (3, 4), "t": (3, 4)}))


def test_withheld_parameters():
    hf = count_up({"a": (2,), "w": (2, 2), "lost": (3,)})
    skip = by_name(lost=lambda parameters, tensor: None)
    trace = run(skip, {"a": empty(2), "w": empty(2, 2)}, hf, excluded={"w": "its kernel permutes it"})
    assert trace.untraced == {
        "w": "the engine's loader puts it into w, and its kernel permutes it",
        "lost": "the engine's loader skips it; it may belong in w: its kernel permutes it",
    }


def test_a_loader_that_fails_before_it_takes_a_tensor():
    def broken(parameters, weights):
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        run(broken, {"a": empty(2)}, count_up({"a": (2,)}))


def layout_of(load, parameters, hf):
    trace = run(load, parameters, hf)
    return traced_layout([trace.shard], {name: tuple(tensor.shape) for name, tensor in hf.items()})


@pytest.mark.parametrize(
    ("load", "shapes", "sentence"),
    [
        (
            by_name(),
            {"a": (2,)},
            r"worker 0 of the engine cannot take weights: \[0:2, 0:2\] of w is written by no tensor",
        ),
        (
            by_name(w=lambda parameters, tensor: parameters["w"][:, :1].copy_(tensor[:, :1])),
            {"a": (2,), "w": (2, 2)},
            r"\[0:2, 1:2\] of w is written by no tensor",
        ),
        (
            by_name(v=lambda parameters, tensor: parameters["w"][1:].copy_(tensor[1:])),
            {"a": (2,), "w": (2, 2), "v": (2, 2)},
            r"\[1:2, 0:2\] of w is written twice",
        ),
        (
            by_name(v=lambda parameters, tensor: None),
            {"a": (2,), "w": (2, 2), "v": (2, 2)},
            r"no worker of the engine holds \[0:2, 0:2\] of v: the engine's loader skips it",
        ),
        (
            by_name(a=lambda parameters, tensor: parameters["a"].copy_(tensor[1:])),
            {"a": (3,), "w": (2, 2)},
            r"no worker of the engine holds \[0:1\] of a",
        ),
    ],
)
def test_a_layout_with_a_gap_or_an_overlap_is_refused(load, shapes, sentence):
    with pytest.raises(UserError, match=sentence):
        layout_of(load, {"a": empty(2), "w": empty(2, 2)}, count_up(shapes))


def test_gaps_are_found_where_another_rank_or_tensor_of_the_shape_has_none():
    whole = run(by_name(), {"a": empty(2)}, count_up({"a": (2,)})).shard
    half = Shard(whole.local_shapes, [])
    with pytest.raises(UserError, match="worker 1 of the engine"):
        traced_layout([whole, half], {"a": (2,)})


def test_local_tensors_of_other_parameters():
    trace = run(by_name(), {"a": empty(2)}, count_up({"a": (2,)}))
    with pytest.raises(ValueError, match="a has shape"):
        local_tensors({"a": empty(3)}, trace.shard)


def test_parts_of_what_is_followed_are_known_by_their_origin_copied_or_not():
    tracer = LoadTracer({}, {})
    with tracer:
        stacked = tracer.follow("stacked", (4, 6, 5), torch.bfloat16)
        gate, up = (half.contiguous() for half in stacked.chunk(2, dim=1))
        third = up.chunk(4)[2].squeeze(0)
        unknown = torch.empty(3, device="meta")
        every_other = stacked[:, ::2]
    assert tracer.origin(stacked) == ("stacked", Box((0, 0, 0), (4, 6, 5)))
    assert tracer.origin(gate) == ("stacked", Box((0, 0, 0), (4, 3, 5)))
    assert tracer.origin(third) == ("stacked", Box((2, 3, 0), (3, 6, 5)))
    for other in (unknown, every_other):
        with pytest.raises(UntraceableError, match="a tensor of shape"):
            tracer.origin(other)
