"""Forecasts: each number of a small refit computed by hand, and the words for all bounds."""

from dataclasses import replace

import numpy as np
import pytest
from small_traffic import traffic_of

from converters.architectures import read_architecture
from converters.cost import lower_bounds
from converters.layouts.megatron import ParallelSizes
from converters.number_formats import NUMBER_FORMATS
from converters.topology import Topology
from megarl.planning.cluster import Cluster, Cores
from megarl.planning.forecast import Forecast
from megarl.planning.picture import draw_forecast
from megarl.planning.refit import PlannedRefit
from megarl.planning.report import BOUNDS, facts, tables

GB = 10**9
CLUSTER = Cluster(gpus_per_node=2, nic_gbit_per_s=8, nvlink_gbyte_per_s=10, memory_gbyte_per_s=40)
"""A NIC moves 1 GB/s, NVLink 10 GB/s; a rank packs and unpacks 20 GB/s of bf16."""
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "head_dim": 4,
}


def forecast_of(
    topology: Topology, direct, relayed=None, *, number_format=None, replicas=1, cluster=CLUSTER
) -> Forecast:
    architecture = read_architecture(QWEN)
    workers = len(topology.destination_gpu) // replicas
    refit = PlannedRefit(
        architecture=architecture,
        engine_architecture=architecture,
        trainer=ParallelSizes(world_size=len(topology.source_gpu)),
        engine=ParallelSizes(world_size=workers),
        replicas=replicas,
        number_format=number_format,
        cluster=cluster,
        bucket_bytes=GB,
    )
    return Forecast.of(refit, traffic_of(topology, direct, relayed))


def test_pairs_of_one_node_are_told_from_those_of_two() -> None:
    # Sources on nodes 0 and 1, workers on nodes 1, 0 and 2; one pair of a node has nothing for each other.
    forecast = forecast_of(Topology([0, 1], [0, 1], [1, 0, 2], [2, 3, 4]), [[GB, GB, GB], [0, GB, GB]])
    assert forecast.pairs == (1, 4)
    assert facts(forecast)["pairs"] == {"memory": 1, "network": 4}


def test_every_stage_takes_as_long_as_its_busiest_rank_or_port() -> None:
    # Source 0 sends 4 and 2 GB to the two GPUs of node 1, source 1 sends 3 GB; 1 GB goes on from one to the other.
    topology = Topology([0, 0], [0, 1], [1, 1], [2, 3])
    forecast = forecast_of(topology, [[4 * GB, 2 * GB], [0, 3 * GB]], [[0, GB], [0, 0]])
    assert forecast.stages == pytest.approx({"pack": 6 / 20, "network": 6.0, "nvlink": 0.1, "unpack": 6 / 20})
    assert forecast.transfer_seconds == 6.0
    assert (forecast.binding_port.kind, forecast.binding_port.gpu) == ("nic_out", 0)
    # Messages of a bucket, 1 GB: one is packed before and one unpacked after it all.
    assert forecast.predicted_seconds == pytest.approx(6 + 2 / 20)
    loads = {load.name: (load.most, load.busiest, load.mean) for load in forecast.loads}
    assert loads == {
        "out of a GPU": (6 * GB, 0, pytest.approx(10 * GB / 3)),
        "into a GPU": (6 * GB, 3, 5 * GB),
        "NIC out": (6 * GB, 0, 4.5 * GB),
        "NIC in": (5 * GB, 3, 4.5 * GB),
        "NVLink out": (GB, 2, GB),
        "NVLink in": (GB, 3, GB),
        "NICs of a node out": (9 * GB, 0, 9 * GB),
        "NICs of a node in": (9 * GB, 1, 9 * GB),
    }
    assert forecast.replay.seconds >= 6.0


def test_a_format_says_how_often_bytes_are_read_and_written_to_make_it() -> None:
    costs = {"bf16": 2, "fp8_block": 3, "fp8_block_ue8m0": 3, "int8_channel": 5, "mxfp8": 3}
    # Nothing is declared that nobody reads: no refit of the others is planned.
    assert costs.keys() - {"bf16"} == {name for name, each in NUMBER_FORMATS.items() if each.pack_passes is not None}
    for name, passes in costs.items():
        forecast = forecast_of(Topology.apart(1, 1), [[6 * GB]], number_format=NUMBER_FORMATS.get(name))
        assert forecast.stages["pack"] == pytest.approx(6 * passes / 40)
        assert forecast.stages["unpack"] == pytest.approx(6 * 2 / 40)


def test_ranks_that_share_cores_wait_for_each_others_work() -> None:
    # A core packs 20 GB in 2 s and unpacks them in 1 s; the way takes it 1 s, and each of two messages of 1 GB 0.1 s.
    cores = Cores(per_node=1, pack_gbyte_per_s=10, unpack_gbyte_per_s=20, message_us=1e5)
    one_node = Topology([0, 0], [0, 1], [0], [2])
    alone = forecast_of(one_node, [[2 * GB], [0]], cluster=replace(CLUSTER, nvlink_gbyte_per_s=20, cores=cores))
    assert alone.stages["cores"] == pytest.approx(2 * (0.1 + 0.05 + 0.05) + 4 * 0.1)
    assert alone.replay.seconds == pytest.approx(alone.stages["cores"])
    # With two cores a source packs while the other source does, but the one destination unpacks alone.
    two = replace(CLUSTER, nvlink_gbyte_per_s=np.inf, cores=replace(cores, per_node=2))
    both = forecast_of(one_node, [[GB], [GB]], cluster=two)
    assert both.stages["cores"] == pytest.approx((2 * 0.2 + 2 * 0.15) / 2)
    assert both.replay.seconds == pytest.approx(0.2 + 2 * 0.15)
    assert "cores" in [row.strip() for table in tables(both) for row in table.columns[0].cells]


def test_ranks_of_one_gpu_move_nothing_through_ports() -> None:
    forecast = forecast_of(Topology.colocated(2, 2, gpus_per_node=2), [[GB, 0], [0, GB]])
    assert forecast.transfer_seconds == 0.0
    assert forecast.over_lower_bound(0.0) == 1.0
    assert forecast.over_lower_bound(1.0) == float("inf")
    assert forecast.replay.seconds == pytest.approx(0.1)


def test_every_lower_bound_has_its_words() -> None:
    forecast = forecast_of(Topology.apart(1, 1), [[GB]])
    assert forecast.lower_bounds == lower_bounds(forecast.traffic, CLUSTER.rates)
    assert forecast.lower_bounds.keys() == BOUNDS.keys()
    assert facts(forecast)["lower_bound_seconds"] == max(forecast.lower_bounds.values())


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_picture_shows_all_bytes_and_ports(replicas: int) -> None:
    direct = np.arange(12).reshape(3, 4) * GB
    forecast = forecast_of(Topology.separate(3, 4, gpus_per_node=2), direct, replicas=replicas)
    flow, ports, *_ = draw_forecast(forecast).axes
    assert np.array_equal(flow.images[0].get_array(), direct / 1e6)
    # The trainer's third GPU is alone on its node, so the engines begin on GPU 4.
    drawn = {patch.get_label(): patch.get_data().values for patch in ports.patches}
    assert np.array_equal(drawn["NIC out"], [6.0, 22.0, 38.0, 0, 0, 0, 0, 0])
    assert np.array_equal(drawn["NIC in"], [0, 0, 0, 0, 12.0, 15.0, 18.0, 21.0])
