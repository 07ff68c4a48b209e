"""Prints an inventory and its findings as tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.doctor.findings import GIB, Finding
from megarl.doctor.inventory import Gpu, Inventory

_WIDTH_IN_A_FILE = 10_000


def whole_lines() -> Console:
    """A console whose tables are as wide as the terminal, or in a file as wide as their contents."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=_WIDTH_IN_A_FILE)


def print_report(inventory: Inventory, findings: Sequence[Finding]) -> None:
    """Print the equipment, then what would not work, then whether training can run."""
    console = whole_lines()
    facts = Table(title="This machine", title_justify="left", show_header=False)
    for name, value in _rows(inventory):
        facts.add_row(name, value)
    console.print(facts)
    obstacles = Table("", "does not work", "why", "what to do", title="Findings", title_justify="left")
    for finding in findings:
        mark = "[red]blocks[/red]" if finding.blocks else "[yellow]limits[/yellow]"
        obstacles.add_row(mark, *map(escape, (finding.what, finding.why, finding.remedy)))
    console.print(obstacles)
    blocked = any(finding.blocks for finding in findings)
    console.print("The main job cannot run here." if blocked else "The main job can run here.")


def _memory(gpu: Gpu) -> str:
    return "memory unknown" if gpu.memory_bytes is None else f"{gpu.memory_bytes / GIB:.0f} GiB"


def _rows(inventory: Inventory) -> list[tuple[str, str]]:
    gpus = ", ".join(f"{gpu.name} ({_memory(gpu)})" for gpu in inventory.gpus)
    return [
        ("device", inventory.device),
        ("engines", ", ".join(inventory.engines.values()) or "none"),
        ("Python", f"{inventory.python}, {inventory.system}"),
        ("CPU cores", str(inventory.cpu_cores)),
        ("GPUs", gpus or "none"),
        ("memory", f"{inventory.memory_available_bytes / GIB:.1f} of {inventory.memory_bytes / GIB:.1f} GiB available"),
        ("/dev/shm", f"{inventory.shared_memory_bytes / GIB:.1f} GiB free"),
        ("InfiniBand", ", ".join(inventory.rdma_devices) or "none"),
        ("locked memory", inventory.limits.locked_memory),
        ("open files", str(inventory.limits.open_files or "no limit")),
        ("disk here", f"{inventory.disk_free_bytes / GIB:.1f} GiB free"),
        *((name, version or "not installed") for name, version in inventory.packages.items()),
    ]
