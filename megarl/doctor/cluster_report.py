"""Prints a report on a cluster as tables."""

from statistics import median

from rich.markup import escape
from rich.table import Table

from megarl.doctor.cluster_check import ClusterReport
from megarl.doctor.findings import GIB
from megarl.doctor.node_probe import Link, Node
from megarl.doctor.report import whole_lines


def print_cluster(report: ClusterReport) -> None:
    """Print one line per node, then faults and warnings, then whether the cluster is sound."""
    console = whole_lines()
    table = Table(
        *(
            "node",
            "address",
            "device",
            "free memory",
            "slowest TFLOP/s",
            "GB/s",
            "ms there and back",
            "clock",
            "locked memory",
            "open files",
        ),
        title="Nodes",
        title_justify="left",
    )
    for node in report.nodes:
        table.add_row(*map(escape, _row(node, report.links)))
    console.print(table)
    for title, faults in (("Faults", report.refusals), ("Warnings", report.warnings)):
        if faults:
            table = Table("node", "what is wrong", "what to do", title=title, title_justify="left")
            for fault in faults:
                table.add_row(*map(escape, (fault.node, fault.what, fault.remedy)))
            console.print(table)
    names = ", ".join(dict.fromkeys(fault.node for fault in report.refusals))
    in_use = ", ".join(node.name for node in report.nodes if not node.compute)
    but = f", but what computes on {in_use} is in use and was not measured" if in_use else ""
    console.print(f"Not sound: {names}." if names else f"All {len(report.nodes)} nodes are sound{but}.")


def _row(node: Node, links: list[Link]) -> tuple[str, ...]:
    own = [link for link in links if node.name in (link.sender, link.receiver) and not link.failure]
    slowest = min(node.compute, key=lambda compute: compute.tflops, default=None)
    return (
        node.name,
        node.address,
        "in use" if slowest is None else f"{len(node.compute)} x {slowest.name}",
        "" if slowest is None else f"{min(each.free_memory_bytes for each in node.compute) / GIB:.0f} GiB",
        "" if slowest is None else f"{slowest.tflops:.3g}",
        f"{median(link.gbyte_per_s for link in own):.3g}" if own else "",
        f"{median(link.latency_s for link in own) * 1e3:.2f}" if own else "",
        f"{node.clock_offset_s:+.2f} s",
        node.limits.locked_memory,
        str(node.limits.open_files or "no limit"),
    )
