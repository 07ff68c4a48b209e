"""Check this machine: what is installed, which device and engine would be used, what would not work and why.

Exits with 0 unless training (`megarl train`) cannot run here. With --cluster it checks all nodes of a Ray cluster and
the network between them, and names the nodes that are slow, broken or different from the rest; it exits with 0 unless
there is one.
"""

import argparse
import json

from converters.errors import UserError

EXAMPLES = """examples:
  megarl doctor
  megarl doctor --json
  megarl doctor --cluster auto
  megarl doctor --cluster 10.0.0.1:6379 --folders /runs --inputs /models /data
"""
TAKES_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="of a Ray cluster (host:port, or auto on one of its nodes)"
    )
    parser.add_argument(
        "--folders",
        nargs="+",
        default=[],
        metavar="DIR",
        help="with --cluster: folders that runs write into; one node writes there, and all are to see it",
    )
    parser.add_argument(
        "--inputs",
        nargs="+",
        default=[],
        metavar="PATH",
        help="with --cluster: files and folders that runs read, and all nodes are to see; they may be read-only",
    )


def run(options: argparse.Namespace) -> int:
    """Print the findings; 1 if one of them prevents training, or a cluster has a fault."""
    from dataclasses import asdict

    if options.cluster:
        return _check_cluster(options)
    for name in ("folders", "inputs"):
        if getattr(options, name):
            raise UserError(f"--{name} are those of a cluster: give --cluster ADDRESS, too")

    from megarl.doctor.findings import find
    from megarl.doctor.inventory import take_inventory

    inventory = take_inventory()
    findings = find(inventory)
    blocked = any(finding.blocks for finding in findings)
    if options.json:
        report = {**asdict(inventory), "findings": [asdict(finding) for finding in findings], "ready": not blocked}
        print(json.dumps(report, indent=2))
    else:
        from megarl.doctor.report import print_report

        print_report(inventory, findings)
    return 1 if blocked else 0


def _check_cluster(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from megarl.cluster.ray.runtime import ray_cluster
    from megarl.doctor.cluster_check import check_cluster
    from megarl.doctor.cluster_report import print_cluster
    from megarl.schema import ClusterConfig

    with ray_cluster(ClusterConfig(address=options.cluster)):
        report = check_cluster(options.folders, options.inputs)
    if options.json:
        print(json.dumps({**asdict(report), "sound": not report.refusals}, indent=2))
    else:
        print_cluster(report)
    return 1 if report.refusals else 0
