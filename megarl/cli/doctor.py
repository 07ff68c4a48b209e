"""Look at this machine: what is installed, which device and engine would be used, what would not work and why.

Ends with 0 unless the main job (`megarl train`) cannot run here.
"""

import argparse
import json

EXAMPLES = """examples:
  megarl doctor
  megarl doctor --json
"""
TAKES_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the findings; 1 where one of them keeps the main job from running."""
    from dataclasses import asdict

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
