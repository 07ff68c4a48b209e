"""A forecast as tables for people and as facts for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import inf, prod
from types import MappingProxyType
from typing import Any

from rich.table import Table

from converters.errors import UserError, names_as_given
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.amounts import say_bytes, say_count
from megarl.planning.cluster import Cluster
from megarl.planning.forecast import Forecast

_PORTS = {"nic_out": "NIC out of", "nic_in": "NIC into", "nvlink_out": "NVLink out of", "nvlink_in": "NVLink into"}
BOUNDS = {
    "node_in": "what a node needs comes in once, through all its NICs",
    "sources_out": "what only some GPUs of the trainer have goes out of their NICs once for each node",
    "gpu_in": "what a GPU needs comes through its NIC and its NVLink",
}
"""Each bound of `converters.cost.lower_bounds` in words."""


def facts(forecast: Forecast) -> dict[str, Any]:
    """The whole forecast; sizes in bytes, times in seconds."""
    refit, traffic = forecast.refit, forecast.traffic
    port = forecast.binding_port
    return {
        "model_type": refit.architecture.model_type,
        "parameters": _parameters(forecast),
        "trainer_gpus": refit.trainer.world_size,
        "trainer": _sizes(refit.trainer),
        "engine_gpus": refit.engine.world_size,
        "engine": _sizes(refit.engine),
        "engine_dtype": refit.engine_dtype,
        "replicas": refit.replicas,
        "colocated": refit.colocated,
        "node_once": refit.node_once,
        "cluster": _cluster_facts(refit.cluster, traffic.topology.nodes),
        "bytes_needed": int(traffic.needed.sum()),
        "bytes_sent": int(traffic.direct.sum()),
        "bytes_relayed": int(traffic.relayed.sum()),
        "pieces": traffic.pieces,
        "relays": traffic.relays,
        "messages": len(forecast.replay.messages.nbytes),
        "peers": dict(zip(("trainer", "engine"), forecast.peers, strict=True)),
        "pairs": dict(zip(("memory", "network"), forecast.pairs, strict=True)),
        "loads": {
            load.name: {"most": load.most, load.place: load.busiest, "mean": round(load.mean)}
            for load in forecast.loads
        },
        "lower_bound_seconds": forecast.lower_bound_seconds,
        "lower_bounds": forecast.lower_bounds,
        "stage_seconds": forecast.stages,
        "transfer_seconds": forecast.transfer_seconds,
        "predicted_seconds": forecast.predicted_seconds,
        "simulated_seconds": forecast.replay.seconds,
        "transfer_over_lower_bound": _finite(forecast.over_lower_bound(forecast.transfer_seconds)),
        "simulated_over_lower_bound": _finite(forecast.over_lower_bound(forecast.replay.seconds)),
        "binding_port": {"kind": port.kind, "gpu": port.gpu, "seconds": port.seconds},
        "bucket_bytes": refit.bucket_bytes,
        "buckets": refit.buckets,
        "extra_bytes_per_gpu": forecast.extra_bytes_per_gpu,
    }


def tables(forecast: Forecast, names: Mapping[str, str] = MappingProxyType({})) -> Iterator[Table]:
    """Tables of the traffic, the load of the ports, and the times; `names` as for `names_as_given`."""
    yield _summary(forecast, names)
    yield _loads(forecast)
    yield _times(forecast)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < number < len(columns) - 1 else "left", overflow="fold")
    return table


def _summary(forecast: Forecast, names: Mapping[str, str]) -> Table:
    refit, traffic, cluster = forecast.refit, forecast.traffic, forecast.refit.cluster
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", f"{refit.architecture.model_type}, {_parameters(forecast):,} parameters")
    table.add_row("trainer", f"{say_count(refit.trainer.world_size, 'GPU')}: {_say_sizes(refit.trainer)}")
    each = f"{say_count(refit.engine.world_size, 'GPU')}: {_say_sizes(refit.engine)}, {refit.engine_dtype}"
    where = "on the trainer's GPUs" if refit.colocated else "on GPUs of their own"
    table.add_row("engines", f"{refit.replicas} of {each}, {where}")
    try:
        with names_as_given(names):
            refit.check_served()
    except UserError as error:
        table.add_row("no run has them", str(error))
    table.add_row("cluster", _say_cluster(cluster, traffic.topology.nodes))
    sent, relayed = traffic.direct.sum(), traffic.relayed.sum()
    table.add_row(
        "moves",
        f"{say_bytes(sent)} from trainer to engines in {say_count(traffic.pieces, 'piece')}, {say_bytes(relayed)} from"
        f" engine to engine inside nodes; {say_bytes(int(traffic.needed.sum()))} are needed",
    )
    table.add_row(
        "extra memory",
        f"{say_bytes(forecast.extra_bytes_per_gpu)} a GPU: {refit.buckets} buckets of {say_bytes(refit.bucket_bytes)}"
        " for each rank on it",
    )
    of_trainer, of_engine = forecast.peers
    near, far = forecast.pairs
    table.add_row(
        "connections",
        f"a trainer's rank meets {say_count(of_trainer, 'worker')}, a worker {say_count(of_engine, 'rank')}, at most;"
        f" {say_count(near + far, 'pair')}, {near:,} of them through memory of their node",
    )
    return table


def _cluster_facts(cluster: Cluster, nodes: int) -> dict[str, Any]:
    return {**{name: _finite(value) for name, value in asdict(cluster).items()}, "nodes": nodes}


def _finite(value: Any) -> Any:
    """Make a value representable in JSON, which has no number for the rate of something that takes no time."""
    return None if value == inf else value


def _say_cluster(cluster: Cluster, nodes: int) -> str:
    if cluster.cores is None:
        return (
            f"{say_count(nodes, 'node')} of {say_count(cluster.gpus_per_node, 'GPU')}; a GPU has"
            f" {cluster.nic_gbit_per_s:g} Gbit/s of network, {cluster.nvlink_gbyte_per_s:g} GB/s of NVLink,"
            f" {cluster.memory_gbyte_per_s:g} GB/s of memory"
        )
    cores, moves = cluster.cores, f"moves {cluster.nvlink_gbyte_per_s:g} GB/s between ranks of a node"
    if cluster.nvlink_gbyte_per_s == inf:
        moves = "moves nothing between ranks of a node, which map each other's memory"
    of_node = f"{say_count(cores.per_node, 'core')} for {say_count(cluster.gpus_per_node, 'rank')}"
    return (
        f"{say_count(nodes, 'node')} of {of_node}; a core packs {cores.pack_gbyte_per_s:g} GB/s, unpacks"
        f" {cores.unpack_gbyte_per_s:g} GB/s, takes {cores.message_us:g} us for a message at either end, and {moves}"
    )


def _loads(forecast: Forecast) -> Table:
    table = _table("Bytes through ports", "", "busiest", "mean", "which")
    for load in forecast.loads:
        which = f"{load.place} {load.busiest}" if load.most else ""
        table.add_row(load.name, say_bytes(load.most), say_bytes(load.mean), which)
    return table


def _times(forecast: Forecast) -> Table:
    table = _table("Seconds", "", "s", "x bound", "of what")
    bound, lower_bound_seconds = max(forecast.lower_bounds.items(), key=lambda item: item[1])
    port, stages = forecast.binding_port, forecast.stages
    rows = (
        ("lower bound", lower_bound_seconds, BOUNDS[bound]),
        ("transfer, predicted", forecast.transfer_seconds, f"the busiest port: {_PORTS[port.kind]} GPU {port.gpu}"),
        ("  pack", stages["pack"], "the source that sends most, by its memory"),
        ("  network", stages["network"], "the busiest NIC"),
        ("  NVLink", stages["nvlink"], "the busiest, relays inside nodes included"),
        ("  unpack", stages["unpack"], "the destination that receives most, by its memory"),
        *([("  cores", stages["cores"], "the node whose cores have most to do")] if "cores" in stages else []),
        (
            "all, predicted",
            forecast.predicted_seconds,
            "stages overlap: the slowest, and a message before and after it",
        ),
        ("all, simulated", forecast.replay.seconds, f"{len(forecast.replay.packed):,} messages replayed"),
    )
    for name, seconds, what in rows:
        ratio = forecast.over_lower_bound(seconds)
        table.add_row(name, f"{seconds:.3f}", "" if ratio == inf else f"{ratio:.2f}", what)
    return table


def _parameters(forecast: Forecast) -> int:
    return sum(map(prod, forecast.refit.architecture.hf_shapes.values()))


def _sizes(parallel: ParallelSizes) -> dict[str, int | bool]:
    return {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "vpp": parallel.chunks,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "etp": parallel.expert_tensor_size,
        "dp": parallel.data_parallel_size,
        "fsdp2": parallel.use_torch_fsdp2,
    }


def _say_sizes(parallel: ParallelSizes) -> str:
    """Format the sizes other than 1, with the abbreviations of Megatron's users."""
    said = [f"{name.upper()} {size}" for name, size in _sizes(parallel).items() if size > 1 and name != "dp"]
    copies = parallel.weight_copies
    if copies > 1:
        said.append(f"in rows over {copies} ranks (FSDP2)" if parallel.use_torch_fsdp2 else f"attention {copies} times")
    return ", ".join(said) or "not cut"
