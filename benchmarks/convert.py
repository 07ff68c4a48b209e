"""Speed of `megarl convert` and `megarl export`, compared with `cp`, the disk, mbridge and megatron-bridge.

Uses synthetic checkpoints of several sizes; programs take turns, each from the same state of disk and page cache.
`make benchmark-convert` installs the peers first. They are measured with `--shape narrow` only; if they are left out, a
line says why.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from conversion.observe import Observation, observe
from conversion.programs import (
    MEGARL,
    PEERS,
    Form,
    Program,
    disk_programs,
    our_programs,
    peer_programs,
    why_no_peers,
)
from conversion.report import dry_run_sentence, page, sentences
from conversion.rounds import Run, run_rounds
from conversion.synthetic import DEEPSEEK_V3, QUANTIZATION_CONFIG, SHAPES, write_checkpoint
from conversion.tables import summarise, table
from machine import at_least_one, describe
from rich.console import Console

from megarl.tracking.versions import versions

_DRY_RUN = "dry-run"
_OF_PEERS = ("mbridge", "megatron-bridge")
_GROUPS = ("disk", "megarl", *_OF_PEERS, _DRY_RUN)
_VERSIONS = ("python", "megarl", "torch", "megatron-core", "safetensors")
_PEERS = (*_OF_PEERS, "transformers")
# 15 stages share 60 of the 61 layers.
_DRY_RUN_LAYOUT = ("--tp", "8", "--pp", "16", "--ep", "32", "--decoder-last-pipeline-num-layers", "1")


def main() -> None:
    """Measure and print; see `--help`."""
    options = _parse_options()
    console = Console(width=200 if not sys.stdout.isatty() else None, highlight=False)
    programs = [
        program
        for program in (*disk_programs(options.workers), *our_programs(options.workers), *peer_programs(options.shape))
        if program.group in options.only
    ]
    runs_of_size: dict[float, list[Run]] = {}
    dry_runs: list[Observation] = []
    with tempfile.TemporaryDirectory(prefix="megarl-benchmark-", dir=options.folder) as name:
        folder = Path(name)
        absent = why_no_peers(options.shape) if set(options.only) & set(_OF_PEERS) else None
        facts = _facts(folder, options.shape, has_peers=any(program.group in _OF_PEERS for program in programs))
        for each in (*facts.values(), *filter(None, [absent])):
            console.print(each)
        for size in options.sizes_gb if programs else ():
            runs_of_size[size] = list(_measure(programs, size, options, folder, console))
            console.print(table(summarise(runs_of_size[size])))
            for sentence in sentences(runs_of_size[size], options.workers):
                console.print(sentence)
        if _DRY_RUN in options.only:
            dry_runs = _dry_runs(options.rounds, folder)
            console.print(dry_run_sentence(dry_runs))
    if options.markdown is not None:
        options.markdown.write_text(page(facts, runs_of_size, dry_runs, options.workers))
    if options.json is not None:
        _write_json(options.json, facts, runs_of_size, dry_runs)


def _measure(
    programs: Sequence[Program], size_gb: float, options: argparse.Namespace, folder: Path, console: Console
) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        forms = {program.form for program in programs}
        sources: dict[Form, Path] = {form: Path(name) / form for form in get_args(Form)}
        _make_sources(sources, forms, SHAPES[options.shape](int(size_gb * 1e9)))

        def report(run: Run) -> None:
            said = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in run.phases)
            console.print(f"{size_gb:g} GB, round {run.round + 1}/{options.rounds}: {said}")

        yield from run_rounds(programs, sources, options.rounds, Path(name), report)


def _make_sources(sources: Mapping[Form, Path], forms: set[Form], config: Mapping[str, Any]) -> None:
    write_checkpoint(config, sources["bf16"])
    if "FP8" in forms:
        write_checkpoint(config, sources["FP8"], fp8=True)
    if "Megatron" in forms:
        convert = next(program for program in our_programs([1]) if program.form == "bf16")
        observe(convert.command(sources["bf16"], sources["Megatron"]), convert.environment)


def _dry_runs(rounds: int, folder: Path) -> list[Observation]:
    model = folder / "released"
    model.mkdir()
    config = {**DEEPSEEK_V3, "quantization_config": QUANTIZATION_CONFIG}
    (model / "config.json").write_text(json.dumps(config))
    places = ("--hf", str(model), "--out", str(folder / "none"))
    command = (*MEGARL, "convert", "--dry-run", *places, *_DRY_RUN_LAYOUT, "--json")
    (program, *_) = our_programs([1])
    return [observe(command, program.environment) for _ in range(rounds)]


def _facts(folder: Path, shape: str, *, has_peers: bool) -> dict[str, str]:
    ours = {name: version for name, version in versions().items() if name in _VERSIONS}
    installed = metadata.distributions(path=[str(PEERS)]) if has_peers else []
    theirs = {peer.name: peer.version for peer in installed if peer.name in _PEERS}
    return {
        "Date": date.today().isoformat(),
        "Machine": describe(folder),
        "Versions": _joined(ours) + (f"; {_joined(theirs)}" if theirs else ""),
        "Checkpoints": shape,
        "Command": f"`python {shlex.join(sys.argv)}`",
    }


def _joined(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _write_json(
    file: Path, facts: Mapping[str, str], runs: Mapping[float, Sequence[Run]], dry_runs: Sequence[Observation]
) -> None:
    result = {
        **facts,
        "runs": {size: [asdict(run) for run in of_size] for size, of_size in runs.items()},
        "dry_runs": [asdict(seen) for seen in dry_runs],
    }
    file.write_text(json.dumps(result, indent=2) + "\n")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-gb", type=float, nargs="+", default=[0.3], metavar="GB", help="10^9 bytes, in bf16")
    parser.add_argument(
        "--shape", choices=SHAPES, default="shallow", help="of the checkpoints: layers or widths follow"
    )
    parser.add_argument("--rounds", type=at_least_one, default=3, help="runs of each program")
    parser.add_argument("--workers", type=at_least_one, nargs="+", default=[1, 2], help="processes; the first is 1")
    parser.add_argument("--only", choices=_GROUPS, nargs="+", default=_GROUPS, help="which programs to run")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write, on the disk that is measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run's numbers to FILE")
    options = parser.parse_args()
    if set(options.only) <= set(_OF_PEERS) and (absent := why_no_peers(options.shape)):
        parser.error(absent)
    return options


if __name__ == "__main__":
    main()
