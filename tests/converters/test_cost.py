from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from random_layouts import coordinates, pairs, plans, whole_copies
from released_configs import RELEASED

from converters.architectures import Architecture, read_architecture
from converters.boxes import Box
from converters.cost import (
    Port,
    Ports,
    Rates,
    TensorFormat,
    Traffic,
    busiest_port,
    formats,
    lower_bounds,
    traffic,
)
from converters.errors import UserError
from converters.fp8 import quantised_names
from converters.layout import Layout, Placement, Shard
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.number_formats import FP8_BLOCK
from converters.plan import Plan
from converters.topology import Topology

RATES = Rates(nic_bytes_per_s_per_gpu=50e9, nvlink_bytes_per_s_per_gpu=450e9)


def element_formats(plan: Plan) -> dict[str, TensorFormat]:
    return {name: TensorFormat(shape, 2 + number) for number, (name, shape) in enumerate(plan.source.hf_shapes.items())}


@settings(max_examples=120)
@given(plans())
def test_traffic_is_what_the_transfers_and_relays_carry(plan):
    types = element_formats(plan)
    counted = traffic(plan, types)
    ranks = plan.destination_ranks
    direct = np.zeros((plan.source.ranks, ranks), np.int64)
    relayed, needed = np.zeros((ranks, ranks), np.int64), np.zeros(ranks, np.int64)
    pieces = relays = 0
    for rank in range(ranks):
        part = plan.destination_part(rank)
        pieces, relays = pieces + len(part.transfers), relays + len(part.relays_in)
        for each, matrix in [(t, direct) for t in part.transfers] + [(t, relayed) for t in part.relays_in]:
            matrix[each.source_rank, rank] += each.source_box.size * types[each.hf_name].element_bytes
        for placement in plan.destination.placements(rank % plan.destination.ranks):
            needed[rank] += placement.hf_box.size * types[placement.hf_name].element_bytes
    assert (counted.direct == direct).all()
    assert (counted.relayed == relayed).all()
    assert (counted.needed == needed).all()
    assert (counted.pieces, counted.relays) == (pieces, relays)


@settings(max_examples=120)
@given(plans())
def test_bounds_count_every_element_that_a_node_wants_once(plan):
    """Against sets of elements."""
    types = element_formats(plan)
    counted = traffic(plan, types)
    values = coordinates(plan.source.hf_shapes)
    bytes_of = {int(v): types[name].element_bytes for name, tensor in values.items() for v in tensor.flatten()}

    def elements(layout: Layout, rank: int) -> set[int]:
        placements = layout.placements(rank)
        return {int(v) for p in placements for v in values[p.hf_name][p.hf_box.slices()].flatten()}

    held = [elements(plan.source, rank) for rank in range(plan.source.ranks)]
    place = plan.place
    leaving: dict[tuple[int, ...], int] = {}
    entering = np.zeros(place.nodes, np.int64)
    for node in range(place.nodes):
        there = [rank for rank, at in enumerate(place.destination_node) if at == node]
        wanted = set().union(*(elements(plan.destination, rank % plan.destination.ranks) for rank in there))
        here = set().union(*(held[rank] for rank, at in enumerate(place.source_node) if at == node))
        entering[node] = sum(bytes_of[element] for element in wanted - here)
        for element in wanted - here:
            owners = tuple(rank for rank in range(plan.source.ranks) if element in held[rank])
            leaving[owners] = leaving.get(owners, 0) + bytes_of[element]
    assert (counted.entering == entering).all()
    assert counted.leaving == leaving


@settings(max_examples=120)
@given(plans())
def test_no_plan_is_faster_than_the_lower_bound(plan):
    counted = traffic(plan, element_formats(plan))
    assert busiest_port(counted, RATES).seconds >= max(lower_bounds(counted, RATES).values()) * (1 - 1e-9)


def small_traffic() -> Traffic:
    """Sources on GPUs 0 and 1 (node 0); destinations on GPU 1, and on GPUs 2 and 3 (node 1)."""
    return Traffic(
        Topology([0, 0], [0, 1], [0, 1, 1], [1, 2, 3]),
        direct=np.array([[10, 100, 200], [7, 1000, 0]]),
        relayed=np.array([[0, 0, 0], [0, 0, 50], [0, 3, 0]]),
        needed=np.array([17, 1103, 250]),
        staged=np.zeros(3, np.int64),
        entering=np.array([0, 1300]),
        leaving={(0,): 40, (1,): 900, (0, 1): 360},
        pieces=6,
        relays=2,
    )


def test_bytes_pass_the_ports_between_their_ranks():
    ports = Ports.of(small_traffic())
    assert ports.nic_out.tolist() == [300, 1000, 0, 0]
    assert ports.nic_in.tolist() == [0, 0, 1100, 200]
    assert ports.nvlink_out.tolist() == [10, 0, 50, 3]
    assert ports.nvlink_in.tolist() == [0, 10, 3, 50]


def test_the_busiest_port_gives_the_time():
    assert busiest_port(small_traffic(), Rates(10, 1000)) == Port("nic_in", 2, 110.0)
    assert busiest_port(small_traffic(), Rates(10, 0.1)) == Port("nvlink_out", 2, 500.0)
    assert busiest_port(small_traffic(), Rates(10, 0.1)).seconds == 500.0


def test_the_lower_bounds_by_hand():
    assert lower_bounds(small_traffic(), Rates(10, 90)) == {
        "node_in": 1300 / 2 / 10,
        "sources_out": 900 / 10,
        "gpu_in": 1103 / 100,
    }
    assert max(lower_bounds(small_traffic(), Rates(10, 90)).values()) == 90
    shared = replace(small_traffic(), leaving={(0,): 880, (1,): 900, (0, 1): 360})
    assert lower_bounds(shared, Rates(10, 90))["sources_out"] == (880 + 900 + 360) / 2 / 10


@pytest.mark.parametrize("rates", [(0, 1), (1, -1)])
def test_a_rate_that_is_not_positive_is_an_error(rates):
    with pytest.raises(UserError, match=r"_per_gpu is (0|-1); give the rate"):
        Rates(*rates)


def test_a_block_of_fp8_travels_quantised_only_in_one_piece():
    matrix = TensorFormat((300, 256), 2, FP8_BLOCK)
    size = 128 * 256
    assert matrix.travelling(Box((128, 0), (256, 256))) == size + 2 * 4
    assert matrix.travelling(Box((256, 0), (300, 256))) == 44 * 256 + 2 * 4  # the last blocks are not whole
    assert matrix.travelling(Box((64, 0), (192, 256))) == 2 * size
    assert matrix.held(Box((64, 0), (192, 256))) == size + 4 * 4
    assert matrix.travelling(Box((0, 0), (128, 64))) == 2 * 128 * 64
    assert TensorFormat((300, 256), 4).travelling(Box((0, 0), (128, 64))) == 4 * 128 * 64


def test_formats_are_those_of_released_checkpoints():
    architecture = read_architecture(RELEASED["Moonlight"])
    found = formats(architecture, number_format=FP8_BLOCK)
    assert {name for name, each in found.items() if each.number_format} == quantised_names(architecture)
    assert {name: each.shape for name, each in found.items()} == architecture.hf_shapes
    correction = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert found[correction].element_bytes == 4
    assert found["model.embed_tokens.weight"] == TensorFormat((163840, 2048), 2)
    assert not any(each.number_format for each in formats(architecture, number_format=None).values())


@given(pairs())
def test_a_destination_with_a_gap_has_no_traffic(layouts):
    source, destination = layouts
    shards = [destination.shard(rank) for rank in range(destination.ranks)]
    shards[0] = Shard({**shards[0].local_shapes, "gap": (2,)}, shards[0].placements, shards[0].padding)
    broken = replace(destination, shard_of=shards.__getitem__)
    with pytest.raises(ValueError, match="only 0 of the 2 elements of gap"):
        traffic(Plan(source, broken), element_formats(Plan(source, destination)))


def test_what_no_source_holds_has_no_traffic():
    half = Placement("t0", Box((0, 0), (2, 5)), "t0", Box.whole((2, 5)))
    plan = Plan(Layout(1, {"t0": (3, 5)}, lambda _: Shard({"t0": (2, 5)}, [half])), whole_copies(1, 1))
    with pytest.raises(ValueError, match=r"no source rank holds .* of t0"):
        traffic(plan, element_formats(plan))


ENGINES = {
    "TP4": ParallelSizes(world_size=4, tensor_model_parallel_size=4, expert_tensor_parallel_size=4),
    "EP4": ParallelSizes(world_size=4, expert_model_parallel_size=4, expert_tensor_parallel_size=1),
}


SMALL_DEEPSEEK = {
    **RELEASED["DeepSeek-V3"],
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_nextn_predict_layers": 0,
}


def small_plan(config, engine: str) -> tuple[Plan, Architecture]:
    """TP2 PP2 EP4 on 16 GPUs into 4 engines of 4, on nodes of 4 GPUs."""
    architecture = read_architecture(config)
    trainer = ParallelSizes(
        world_size=16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    source = megatron_layout(architecture, trainer, module_names="te")
    destination = megatron_layout(architecture, ENGINES[engine], module_names="te")
    topology = Topology.separate(16, 16, gpus_per_node=4)
    return Plan(source, destination, 4, topology, node_once=True), architecture


@pytest.mark.parametrize("number_format", [None, FP8_BLOCK])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_plan_of_a_mixture_of_experts_is_near_the_floor(engine, number_format):
    plan, architecture = small_plan(SMALL_DEEPSEEK, engine)
    counted = traffic(plan, formats(architecture, number_format=number_format))
    assert counted.direct.sum() + counted.relayed.sum() == counted.needed.sum()
    assert busiest_port(counted, RATES).seconds <= 1.1 * max(lower_bounds(counted, RATES).values())


def test_blocks_that_two_workers_share_travel_in_bfloat16():
    """The experts of Moonlight are 1408 = 11 x 128 wide, of which a fourth cuts through a block."""
    plan, architecture = small_plan({**RELEASED["Moonlight"], "num_hidden_layers": 4}, "TP4")
    types = {name: each for name, each in formats(architecture, number_format=FP8_BLOCK).items() if ".experts." in name}
    types |= {name: TensorFormat(shape, 0) for name, shape in architecture.hf_shapes.items() if name not in types}
    counted = traffic(plan, types)
    elements = sum(each.shape[0] * each.shape[1] for each in types.values() if each.number_format)
    assert counted.direct.sum() == 2 * elements * plan.replicas
    # A scale of a block that is cut is needed twice.
    assert counted.needed.sum() == pytest.approx((1 + 4 / 128**2) * elements * plan.replicas, rel=1e-3)
