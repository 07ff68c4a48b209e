"""Forecasts a refit between processes that share the cores of this machine, from measured rates."""

from dataclasses import dataclass

from converters.boxes import Box
from converters.cost import formats, traffic
from converters.layout import Shape
from converters.number_formats import FP8_BLOCK
from converters.plan import Plan
from converters.topology import Topology
from megarl.planning.cluster import Cluster, Cores
from megarl.planning.forecast import Forecast
from megarl.planning.refit import PlannedRefit
from megarl.resharding.direct.zero_copy import SMALLEST_BYTES
from resharding.rates import CoreRates, WayCosts
from resharding.scenario import DTYPE, Scenario


@dataclass(frozen=True)
class Way:
    """A refit to forecast: its transport, the UCX transports allowed, and whether the engine's weights are FP8."""

    transport: str
    ucx_tls: str
    is_fp8: bool = False

    @property
    def is_read_by_worker(self) -> bool:
        """Whether the unpacking thread also receives the bytes: NIXL has no thread in an agent that only reads."""
        return self.transport == "rdma"


def forecast(scenario: Scenario, way: Way, rates: CoreRates, costs: WayCosts, cores: int) -> Forecast:
    """The forecast of a refit."""
    number_format = FP8_BLOCK if way.is_fp8 else None
    sources, workers = scenario.trainer.ranks, scenario.megatron_engine.ranks
    place = Topology([0] * sources, range(sources), [0] * workers, range(sources, sources + workers))
    plan = Plan(scenario.trainer, scenario.megatron_engine, 1, place)
    moved = traffic(plan, formats(scenario.architecture, number_format=number_format))
    pack, unpack = _seconds_per_byte(scenario, plan, rates, way)
    on_the_way = costs.of_byte_sent
    if way.is_read_by_worker:
        unpack += costs.of_byte_received
    else:
        on_the_way += costs.of_byte_received
    refit = PlannedRefit(
        architecture=scenario.architecture,
        engine_architecture=scenario.architecture,
        trainer=scenario.trainer_sizes,
        engine=scenario.engine_sizes,
        replicas=1,
        number_format=number_format,
        cluster=Cluster(
            gpus_per_node=sources + workers,
            nvlink_gbyte_per_s=1e-9 / on_the_way if on_the_way else float("inf"),
            cores=Cores(cores, 1e-9 / pack, 1e-9 / unpack, costs.of_message * 1e6),
        ),
        bucket_bytes=scenario.bucket_bytes,
        node_once=False,
    )
    return Forecast.of(refit, moved)


def _seconds_per_byte(scenario: Scenario, plan: Plan, rates: CoreRates, way: Way) -> tuple[float, float]:
    """Seconds per byte for packing and for unpacking in this refit.

    Some bytes are in rows with gaps, some are quantised, and for bytes that are read one-sided only checksums are
    computed.
    """
    names = FP8_BLOCK.quantised_names(scenario.architecture) if way.is_fp8 else frozenset[str]()
    dtypes = scenario.architecture.hf_dtypes(DTYPE)
    sources = [scenario.trainer.local_shapes(rank) for rank in range(scenario.trainer.ranks)]
    total, packing, unpacking = 0, 0.0, 0.0
    for rank in range(scenario.megatron_engine.ranks):
        shapes = scenario.megatron_engine.local_shapes(rank)
        for each in plan.transfers_into(rank):
            is_quantised = each.hf_name in names
            nbytes = each.source_box.size * (1 if is_quantised else dtypes[each.hf_name].itemsize)
            out_of, into = sources[each.source_rank][each.source_name], shapes[each.destination_name]
            ends = _is_contiguous(each.source_box, out_of), _is_contiguous(each.destination_box, into)
            pack = (rates.quantise, rates.quantise_rows) if is_quantised else (rates.pack, rates.pack_rows)
            unpack = rates.unpack, rates.unpack_rows
            if way.transport == "rdma" and all(ends) and not is_quantised and nbytes >= SMALLEST_BYTES:
                pack = unpack = rates.checksum, rates.checksum
            total += nbytes
            packing += nbytes / pack[not ends[0]]
            unpacking += nbytes / unpack[not ends[1]]
    return packing / total, unpacking / total


def _is_contiguous(box: Box, shape: Shape) -> bool:
    """Whether a box of a contiguous tensor of `shape` is contiguous itself."""
    inner = next((number for number, length in enumerate(box.shape) if length > 1), len(shape))
    return box.shape[inner + 1 :] == tuple(shape[inner + 1 :])
