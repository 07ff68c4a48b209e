"""The programs to compare: the command of each, and the phases that its runs report."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from conversion.observe import Observation
from conversion.synthetic import MIN_FILES

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers"
MEGARL = (sys.executable, "-m", "megarl.cli.main")
Form = Literal["bf16", "FP8", "Megatron"]
"""A HuggingFace checkpoint in bf16 or block FP8, or a Megatron checkpoint in bf16, all of the same model."""

_MODULES = {"PYTHONPATH": str(ROOT / "benchmarks")}
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Phase:
    """A part of a run. `reads` and `writes`: whether it processed all bytes of its source and of its output."""

    name: str
    seconds: float
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True)
class Program:
    """`command(source, out)` reads the folder `source`, in the form `form`, and writes the folder `out`."""

    name: str
    group: str
    form: Form
    command: Callable[[Path, Path], Sequence[str]]
    phases: Callable[[Observation], Sequence[Phase]]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a run: one math thread per process, no GPU, no network."""
        return {**os.environ, **_NO_GPU, "OMP_NUM_THREADS": "1", **self.variables}


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def disk_programs(writers: Sequence[int]) -> Iterator[Program]:
    """Programs that measure the disk: raw writes, and `cp` with sync."""
    for number in writers:
        name = f"raw write + sync, {_count(number, 'process', 'processes')}"
        yield Program(name, "disk", "bf16", partial(_write, number), partial(_said, name, reads=False), _MODULES)
    for number in writers:
        name = f"cp + sync, {_count(number, 'process', 'processes')}"
        yield Program(name, "disk", "bf16", partial(_copy, number), partial(_whole, name))


def our_programs(workers: Sequence[int]) -> Iterator[Program]:
    """`megarl convert` and `megarl export`, from and to bf16 and FP8."""
    for number in workers:
        yield _ours("convert", "bf16", "Megatron", number)
        yield _ours("export", "Megatron", "bf16", number)
        yield _ours("convert", "FP8", "Megatron", number, "--dtype", "bf16")
        yield _ours("export", "Megatron", "FP8", number, "--fp8")


def why_no_peers(shape: str) -> str | None:
    """Why mbridge and megatron-bridge cannot be measured; None if they can."""
    if shape != "narrow":
        return (
            "mbridge and megatron-bridge are not measured: with multi-token prediction mbridge takes no other number of"
            " layers than 61, which --shape narrow has."
        )
    if not PEERS.is_dir():
        return f"mbridge and megatron-bridge are not measured: `make benchmark-convert` puts them into {PEERS.name}."
    return None


def peer_programs(shape: str) -> Iterator[Program]:
    """mbridge and megatron-bridge, which load into a model in memory and export from it; empty if they cannot run."""
    if why_no_peers(shape) is not None:
        return
    variables = {"PYTHONPATH": f"{PEERS}:{ROOT / 'benchmarks'}"}
    forms: tuple[tuple[str, Form], ...] = (("mbridge", "bf16"), ("megatron-bridge", "bf16"), ("mbridge", "FP8"))
    for peer, form in forms:
        yield Program(f"{peer}, {form}", peer, form, partial(_peer, peer), partial(_peer_phases, peer, form), variables)


def _ours(verb: str, form: Form, into: Form, workers: int, *options: str) -> Program:
    name = f"megarl {verb}, {form} to {into}, {_count(workers, 'worker', 'workers')}"
    return Program(name, "megarl", form, partial(_megarl, verb, workers, options), partial(_said, name))


def _megarl(verb: str, workers: int, options: Sequence[str], source: Path, out: Path) -> Sequence[str]:
    places: tuple[str, ...] = ("--hf", str(source), "--out", str(out))
    if verb == "export":
        # As many files as a conversion's source has, as two threads that write to one file wait for each other.
        shard_size = folder_bytes(source) // MIN_FILES + 1
        places = ("--megatron", str(source), "--out", str(out), "--shard-size", str(shard_size))
    return (*MEGARL, verb, *places, "--json", "--workers", str(workers), *options)


def _write(writers: int, source: Path, out: Path) -> Sequence[str]:
    options = ("--bytes", str(folder_bytes(source)), "--writers", str(writers), "--out", str(out))
    return (sys.executable, "-m", "conversion.disk", *options)


def _copy(processes: int, source: Path, out: Path) -> Sequence[str]:
    folder = shlex.quote(str(out))
    script = f"mkdir {folder}"
    for number, files in enumerate(deal([file for file in source.iterdir() if file.is_file()], processes)):
        copies = shlex.join(str(out / file.name) for file in files)
        script += f"\ncp {shlex.join(map(str, files))} {folder} && sync {copies} & copying_{number}=$!"
    waits = " && ".join(f"wait $copying_{number}" for number in range(processes))
    return ("sh", "-c", f"{script}\n{waits}")


def deal(files: Sequence[Path], hands: int) -> list[list[Path]]:
    """Distribute files so that all hands get about equally many bytes, largest file first."""
    dealt: list[list[Path]] = [[] for _ in range(hands)]
    sizes = [0] * hands
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        hand = sizes.index(min(sizes))
        dealt[hand].append(file)
        sizes[hand] += file.stat().st_size
    return dealt


def _peer(peer: str, source: Path, out: Path) -> Sequence[str]:
    return (sys.executable, "-W", "ignore", "-m", "conversion.peers", peer, "--hf", str(source), "--out", str(out))


def _peer_phases(peer: str, form: Form, seen: Observation) -> Sequence[Phase]:
    said = seen.last_line
    load = Phase(f"{peer} load, {form} to a model", said["load_seconds"], writes=False)
    if form == "FP8":
        # A model in bf16 has no scales, so no file of the index is complete, and nothing is written.
        return (load,)
    missing = f" ({said['tensors_not_written']} tensors missing)" if said["tensors_not_written"] else ""
    export, synced = said["export_seconds"], said["export_seconds"] + said["sync_seconds"]
    return (
        load,
        Phase(f"{peer} export, a model to {form}{missing}", export, reads=False),
        Phase(f"{peer} export and sync", synced, reads=False),
    )


def _whole(name: str, seen: Observation) -> Sequence[Phase]:
    return (Phase(name, seen.seconds),)


def _said(name: str, seen: Observation, *, reads: bool = True) -> Sequence[Phase]:
    return (Phase(name, seen.last_line["seconds"], reads=reads),)


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
