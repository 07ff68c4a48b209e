"""Options of `megarl plan` that describe the cluster: GPUs and their ports, or the cores of machines without GPUs."""

import argparse
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.cli import plan_step

if TYPE_CHECKING:
    from megarl.planning.cluster import Cluster, Cores

_CLUSTER = (
    (
        "--gpus-per-node",
        "gpus_per_node",
        int,
        None,
        "GPUs of a node, or that NVLink joins (by the device); with --cores ranks of a node (all)",
    ),
    ("--nic-gbit", "nic_gbit_per_s", float, 400.0, "network of one GPU, each way, in Gbit/s"),
    (
        "--nvlink-gbyte",
        "nvlink_gbyte_per_s",
        float,
        None,
        "NVLink of one GPU, each way, in GB/s (by the device); with --cores what a core moves to another rank of its"
        " node (nothing is moved, as through mapped memory)",
    ),
    ("--memory-gbyte", "memory_gbyte_per_s", float, None, "memory of one GPU, in GB/s (by the device)"),
    ("--nodes", "nodes", int, None, "nodes that there are (default: as many as it takes)"),
)
"""Option, field of `Cluster`, type, default, help."""
_CORES = (
    (
        "--pack-gbyte",
        "pack_gbyte_per_s",
        "GB/s of messages that a core packs while all work; of codes, if it quantises",
    ),
    ("--unpack-gbyte", "unpack_gbyte_per_s", "GB/s of messages that a core unpacks while all work"),
    ("--message-us", "message_us", "microseconds of a core for any message, at either end (0)"),
)
"""Option, field of `Cores`, help."""

OPTION_OF_FIELD = {
    **{f"the cluster's {field}": option for option, field, *_ in _CLUSTER},
    **{f"the cores' {field}": option for option, field, _ in _CORES},
}
"""Names of these classes' fields in error messages -> the options that set them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    cluster = parser.add_argument_group("cluster")
    for name, field, kind, default, text in _CLUSTER:
        text += f" ({default:g})" if default else ""
        cluster.add_argument(name, dest=field, type=kind, default=default, metavar="N", help=text)
    cluster.add_argument("--device", default=plan_step.DEFAULT_DEVICE, metavar="NAME", help="GPU (%(default)s)")
    cluster.add_argument("--gpu-gbyte", type=float, metavar="N", help="memory of a GPU in GB (by the device)")
    cluster.add_argument(
        "--colocated", action=argparse.BooleanOptionalAction, help="engines are on the GPUs of the trainer"
    )
    cores = parser.add_argument_group("cores, in place of GPUs")
    cores.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="cores of a node, which do the work of all its ranks; predicts the refit alone",
    )
    for name, field, text in _CORES:
        cores.add_argument(name, dest=field, type=float, metavar="N", help=text)


def described_cluster(options: argparse.Namespace, ranks: int) -> "Cluster":
    """The cluster, with the device's rates by default; one with cores has `ranks` on one node.

    Raises UserError for cores without rates, and for rates without cores.
    """
    from megarl.planning.cluster import Cluster

    device = plan_step.described_device(options.device, options.gpu_gbyte)
    unsaid: dict[str, Any] = {
        "gpus_per_node": device.nvlink_gpus,
        "nvlink_gbyte_per_s": device.nvlink_bytes_per_s / 1e9,
        "memory_gbyte_per_s": device.memory_bytes_per_s / 1e9,
    }
    cores = _cores(options)
    if cores is not None:
        unsaid |= {"gpus_per_node": ranks, "nvlink_gbyte_per_s": float("inf"), "cores": cores}
    given = {field: getattr(options, field) for _, field, *_ in _CLUSTER if getattr(options, field) is not None}
    return Cluster(**{**unsaid, **given})


def _cores(options: argparse.Namespace) -> "Cores | None":
    from megarl.planning.cluster import Cores

    given = {field: getattr(options, field) for _, field, _ in _CORES if getattr(options, field) is not None}
    if options.cores is None:
        if given:
            name = next(name for name, field, _ in _CORES if field in given)
            raise UserError(f"{name} is of the cores of a machine without GPUs: say how many it has by --cores")
        return None
    if missing := [name for name, field, _ in _CORES[:2] if field not in given]:
        raise UserError(
            f"--cores {options.cores} needs {' and '.join(missing)}, what each core does in a second:"
            " `make benchmark-forecast` measures it"
        )
    if options.search:
        raise UserError("--search proposes sizes for GPUs, and --cores is of machines without: leave one of them out")
    return Cores(options.cores, **given)
