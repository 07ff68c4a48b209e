"""Runs a tiny model repeatedly, each time killing a random kind of process at a random moment.

If the controller is killed, the run is started again with the same command; it must survive all other faults by itself.
Each run is compared with an undisturbed one. With deterministic schedules all metrics and the exported weights must be
bit-identical; with all schedules each draw must be trained on once, no token may be older than the schedule allows, and
no process or file may be left behind.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from faults_run import NOTES
from machine import at_least_one, describe, give_out
from transformers.utils import logging
from workload import REWARD, environment

from megarl.output.places import EXPORT
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.tracking import read_history

ROOT = Path(__file__).resolve().parent.parent
STEPS, PROMPTS, SAVED_EVERY = 6, 8, 2
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "S=0": (),
    "S=1, wait": ("schedule.max_staleness=1", "schedule.in_flight=wait"),
    "S=2, recompute": ("schedule.max_staleness=2", "schedule.in_flight=recompute"),
}
BOUNDS = {"S=0": 0, "S=1, wait": 1, "S=2, recompute": 2}
REPEATING = ("S=0", "S=1, wait")
"""Deterministic schedules, whose results do not depend on timing."""
KINDS = ("controller", "engine", "trainer rank", "reward worker")
OF_THE_CLOCK = ("seconds/", "throughput/", "engines/", "schedule/", "memory/", "refit/")
"""Prefixes of metrics that may change with faults or timing."""
STARTING = 0.25
LIMIT_S = 600.0
_POLL_S = 0.02
_GONE_S = 60.0
_LONGEST_STEP_S = 2.0


@dataclass(frozen=True)
class Case:
    """A run with one fault. `moment` is a fraction of the run, of which `STARTING` is before the first rollout."""

    engine: str
    schedule: str
    kind: str
    moment: float
    seed: int


@dataclass
class Outcome:
    """The result of a run."""

    seconds: float
    code: int
    output: Path
    said: list[str] = field(default_factory=list)
    """Lines about deaths and restarts."""
    step: int | None = None
    """Steps done at the time of the fault; None if there was no process to kill any more."""
    left: list[str] = field(default_factory=list)
    """Processes and shared-memory segments that outlived the run."""

    def batches(self) -> dict[int, dict[str, Any]]:
        """The batch of each step; the last one if a step was repeated."""
        notes = [json.loads(line) for line in (self.output / "notes.jsonl").read_text().splitlines()]
        return {note["step"]: note for note in notes}

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics that do not depend on timing."""
        return [
            {name: value for name, value in line.items() if not name.startswith(OF_THE_CLOCK)}
            for line in read_history(self.output)
        ]

    def weights(self) -> bytes:
        """The exported weights."""
        return b"".join(path.read_bytes() for path in sorted((self.output / EXPORT).glob("*.safetensors")))


class Lab:
    """A tiny model and its data, and runs of it."""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        self._folder = folder
        model, files = write_tiny_model("qwen3", folder / "model"), write_arithmetic(folder / "data", held_out=16)
        self._arguments = (
            *("train", "--config-name", "quickstart", f"model.path={model}", f"data.train_files=[{files.train}]"),
            *("megatron.expert_model_parallel_size=1", "rollout.replicas=2", "rollout.max_response_tokens=96"),
            *("rollout.engine_args.max_model_len=128", f"loop.steps={STEPS}", f"loop.prompts_per_step={PROMPTS}"),
            *("loop.samples_per_prompt=4", f"checkpoint.every={SAVED_EVERY}", "tracking.loggers=[jsonl]"),
            f"reward.function={REWARD}",
            "cluster.engine_threads=1",
        )
        self._undisturbed: dict[tuple[str, str], Outcome] = {}

    def undisturbed(self, engine: str, schedule: str) -> Outcome:
        """A run without a fault: the reference for all others with this engine and schedule."""
        key = (engine, schedule)
        if key not in self._undisturbed:
            made = self._undisturbed[key] = self._run(f"undisturbed {engine} {schedule}", engine, schedule, None)
            if made.code != 0:
                raise SystemExit("\n".join(["a run without a fault failed:", *made.said]))
        return self._undisturbed[key]

    def disturbed(self, number: int, case: Case) -> Outcome:
        """A run with a fault."""
        return self._run(f"{number} {case.kind}", case.engine, case.schedule, case)

    def _run(self, name: str, engine: str, schedule: str, case: Case | None) -> Outcome:
        output = self._folder / name.replace(" ", "_").replace(",", "").replace("=", "")
        output.mkdir()
        command = [
            *(sys.executable, str(Path(__file__).with_name("faults_run.py")), *self._arguments),
            *(f"rollout.engine={engine}", *SCHEDULES[schedule], f"output_dir={output / 'run'}"),
        ]
        outcome = Outcome(0.0, 0, output / "run")
        family: set[psutil.Process] = set()
        began = time.monotonic()
        started = [_start(command, output)]
        try:
            if case is not None:
                start_s = STARTING * self.undisturbed(engine, schedule).seconds
                outcome.step = _kill(case, started[0], output, began + start_s * case.moment / STARTING, family)
                if case.kind == "controller" and outcome.step is not None:
                    _wait_gone(family)
                    started.append(_start(command, output))
            outcome.code = _watch(started[-1], began + LIMIT_S, family)
        finally:
            for run in started:
                with suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        outcome.seconds = time.monotonic() - began
        outcome.said = [
            line for line in (output / "errors.log").read_text().splitlines() if "restart" in line or "megarl:" in line
        ]
        outcome.left = [*_wait_gone(family, 5.0), *_segments(run.pid for run in started)]
        return outcome


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    (folder / "run").mkdir(exist_ok=True)
    notes = {NOTES: str(folder / "run" / "notes.jsonl")}
    with (folder / "errors.log").open("ab") as errors:
        return subprocess.Popen(
            command,
            env={**environment(threads=1), **notes},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _watch(run: subprocess.Popen[bytes], deadline: float, family: set[psutil.Process]) -> int:
    """The exit code; -1 for a run that does not end. Adds its processes to `family`."""
    while run.poll() is None:
        if time.monotonic() > deadline:
            return -1
        family.update(_descendants(run.pid))
        time.sleep(0.2)
    return run.returncode


def _kill(
    case: Case, run: subprocess.Popen[bytes], output: Path, start: float, family: set[psutil.Process]
) -> int | None:
    """Kill a process of the kind at its moment, or as soon as there is one; return the steps done by then.

    The moment is within the startup, or within the step after a number of completed steps.
    """
    chance, steps = random.Random(case.seed), (case.moment - STARTING) / (1 - STARTING) * STEPS
    within = chance.uniform(0.0, _LONGEST_STEP_S)
    reached = 0.0
    while run.poll() is None:
        is_due = time.monotonic() >= start if steps < 0 else _steps_done(output) >= int(steps)
        reached = reached or (time.monotonic() + (0.0 if steps < 0 else within) if is_due else 0.0)
        if reached and time.monotonic() >= reached and (found := list(_of_kind(case.kind, run.pid, output / "run"))):
            family.update(_descendants(run.pid))
            with suppress(psutil.NoSuchProcess):
                chance.choice(found).kill()
                return max(_steps_done(output), 0)
        time.sleep(_POLL_S)
    return None


def _steps_done(output: Path) -> int:
    """The number of completed steps; -1 before the first rollout."""
    if (output / "run" / "metrics.jsonl").exists() and (lines := read_history(output / "run")):
        return lines[-1]["step"]
    return 0 if "first refit" in (output / "errors.log").read_text() else -1


def _of_kind(kind: str, controller: int, output: Path) -> Iterator[psutil.Process]:
    if kind == "controller":
        yield psutil.Process(controller)
        return
    role = {"engine": "engine", "trainer rank": "trainer"}.get(kind)
    for process in _descendants(controller):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            if role is None:
                if any("worker_main" in word for word in process.cmdline()):
                    yield process
            elif Path(os.readlink(f"/proc/{process.pid}/fd/1")).match(f"{output}/logs/{role}_*.log"):
                yield process


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_gone(family: set[psutil.Process], seconds: float = _GONE_S) -> list[str]:
    """Wait until the processes are gone; return those that stay."""
    _, alive = psutil.wait_procs(list(family), timeout=seconds)
    return [f"process {each.pid}" for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _segments(pids: Iterator[int]) -> list[str]:
    return [path.name for pid in pids for path in Path("/dev/shm").glob(f"megarl-{pid}-*")]


def cases(count: int, engines: Sequence[str], seed: int) -> list[Case]:
    """All kinds and schedules in turn, at random moments; every fifth case uses the last engine."""
    chance = random.Random(seed)
    schedules = list(SCHEDULES)
    return [
        Case(
            engine=engines[-1] if number % 5 == 1 else engines[0],
            schedule=schedules[(number + number // len(KINDS)) % len(schedules)],
            kind=KINDS[(number + number // len(schedules) // len(KINDS)) % len(KINDS)],
            moment=chance.uniform(0.02, 0.95),
            seed=chance.randrange(2**31),
        )
        for number in range(count)
    ]


def judged(case: Case, outcome: Outcome, reference: Outcome) -> list[str]:
    """Everything that is wrong with a run."""
    if outcome.code != 0:
        return [f"exit code {outcome.code}" if outcome.code > 0 else f"no end within {LIMIT_S:g} s"]
    wrong, batches = list(outcome.left), outcome.batches()
    ordinals = sorted(ordinal for batch in batches.values() for ordinal in batch["ordinals"])
    if ordinals != list(range(STEPS * PROMPTS)):
        wrong.append("a draw was lost, or trained on twice")
    if max(batch["age"] for batch in batches.values()) > BOUNDS[case.schedule]:
        wrong.append("a token older than the schedule allows")
    if case.schedule in REPEATING and (gap := difference(outcome, reference)) > 0:
        wrong.append(f"metrics differ by {gap:.1e}")
    if case.schedule in REPEATING and outcome.weights() != reference.weights():
        wrong.append("the exported weights differ")
    return wrong


def difference(outcome: Outcome, reference: Outcome) -> float:
    """The largest relative difference of any metric in any step; infinite if steps, names or batches differ."""
    ours, theirs = outcome.metrics(), reference.metrics()
    if outcome.batches() != reference.batches() or [set(line) for line in ours] != [set(line) for line in theirs]:
        return math.inf
    gaps = [
        abs(line[name] - value) / max(abs(value), 1e-9)
        for line, other in zip(ours, theirs, strict=True)
        for name, value in other.items()
        if isinstance(value, int | float) and line[name] != value
    ]
    return max(gaps, default=0.0)


HEAD = (
    "| run | engine | schedule | killed | moment | steps done | restarts | s more | found |\n"
    "|---:|---|---|---|---:|---:|---|---:|---|"
)


def row(number: int, case: Case, outcome: Outcome, reference: Outcome) -> str:
    """A table row."""
    wrong = judged(case, outcome, reference)
    done = "had ended" if outcome.step is None else str(outcome.step)
    restarts = "; ".join(_short(line) for line in outcome.said) or (
        "by hand" if case.kind == "controller" and outcome.step is not None else "none needed"
    )
    found = f"**{', '.join(wrong)}**" if wrong else "bit for bit" if case.schedule in REPEATING else "each draw once"
    cells = (
        *(str(number), case.engine, case.schedule, case.kind, f"{case.moment:.2f}", done),
        *(restarts, f"{outcome.seconds - reference.seconds:+.0f}", found),
    )
    return f"| {' | '.join(cells)} |"


def _short(line: str) -> str:
    if "the run goes on" in line or "starts over" in line:
        return "run, from step " + (line.partition("of step ")[2].split(" ")[0] if "of step" in line else "0")
    return "engine" if "is started again" in line else line[:80]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=at_least_one, default=24)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"], help="each fifth run has the last")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs, which else go")
    parser.add_argument("--output", type=Path, help="file for the page; each row is also printed")
    arguments = parser.parse_args()
    page = [describe(ROOT), "", HEAD]
    print("\n".join(page), flush=True)
    wrong, killed = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(arguments.keep or Path(scratch))
        made = cases(arguments.first + arguments.runs, arguments.engines, arguments.seed)
        for number, case in list(enumerate(made))[arguments.first :]:
            reference = lab.undisturbed(case.engine, case.schedule)
            outcome = lab.disturbed(number, case)
            killed += outcome.step is not None
            wrong += bool(judged(case, outcome, reference))
            page.append(row(number, case, outcome, reference))
            print(page[-1], flush=True)
    page += ["", f"{killed} processes killed in {arguments.runs} runs; {wrong} runs with something wrong."]
    print("\n".join(page[-2:]), flush=True)
    if arguments.output:
        give_out("\n".join([*page, ""]), arguments.output)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
