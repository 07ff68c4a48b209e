"""Speedup of schedules: steps per second in virtual time, with the real rule of what is sampled and trained when.

Engines decode responses with heavy-tailed lengths, a trainer takes batches, and a refit stops the engines; the KV cache
of requests in flight is kept at no cost. "In turns" means that engines and trainer share GPUs, and one waits while the
other works. Three rules of other systems are compared: train on the groups that finish first, discard groups that have
become too old, and draw more prompts than a batch needs and drop all but the first to finish.
"""

import argparse
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean
from typing import NamedTuple, Protocol

import numpy as np
from machine import at_least_one, describe

from megarl.run.schedule import Schedule

ROOT = Path(__file__).resolve().parent.parent
PLOT = ROOT / "docs" / "images" / "schedules.png"
SIGMAS = (0.6, 0.8, 1.0, 1.2, 1.4)


OTHERS = ("first finished", "discard", "over-sample")
"""Prefixes of the names of rules that this project does not have."""


class Rule(Protocol):
    """When prompts are drawn, and which finished groups form a batch: the interface of `Schedule`."""

    version: int

    @property
    def staleness_bound(self) -> int: ...

    @property
    def admissible(self) -> int: ...

    @property
    def unfinished(self) -> list[int]: ...

    def admit(self, ordinals: Sequence[int]) -> None: ...

    def finish(self, ordinal: int) -> None: ...

    def takeable(self) -> list[int] | None: ...

    def take(self) -> list[int]: ...

    def release(self) -> None: ...


class FirstFinished:
    """Takes the groups that finish first. With `discard`, slots are freed at once, and too old groups dropped."""

    def __init__(self, prompts_per_step: int, staleness_bound: int, *, discard: bool) -> None:
        self.version, self._bound = 0, staleness_bound
        self._batch, self._discard = prompts_per_step, discard
        self._running: dict[int, int] = {}
        self._finished: dict[int, int] = {}
        self._taken: list[int] = []

    @property
    def admissible(self) -> int:
        held = len(self._running) + (0 if self._discard else len(self._finished) + len(self._taken))
        return (self._bound + 1) * self._batch - held

    @property
    def staleness_bound(self) -> int:
        return self._bound

    @property
    def unfinished(self) -> list[int]:
        return list(self._running)

    def admit(self, ordinals: Sequence[int]) -> None:
        self._running |= dict.fromkeys(ordinals, self.version)

    def finish(self, ordinal: int) -> None:
        self._finished[ordinal] = self._running.pop(ordinal)

    def takeable(self) -> list[int] | None:
        young = [each for each, version in self._finished.items() if not self._too_old(version)]
        return young[: self._batch] if len(young) >= self._batch else None

    def take(self) -> list[int]:
        self._taken = self.takeable() or []
        self._finished = {
            each: version
            for each, version in self._finished.items()
            if each not in self._taken and not self._too_old(version)
        }
        return self._taken

    def release(self) -> None:
        self._taken = []
        self.version += 1

    def _too_old(self, version: int) -> bool:
        return self._discard and self.version - version > self._bound


class OverSampled:
    """Draws more prompts than a batch needs, takes the groups that finish first, and aborts the others."""

    staleness_bound = 0

    def __init__(self, prompts_per_step: int, drawn_per_step: int) -> None:
        self.version = 0
        self._batch, self._draws, self._drawn = prompts_per_step, drawn_per_step, 0
        self._running: set[int] = set()
        self._finished: list[int] = []

    @property
    def admissible(self) -> int:
        return self._draws - self._drawn

    @property
    def unfinished(self) -> list[int]:
        return sorted(self._running)

    def admit(self, ordinals: Sequence[int]) -> None:
        self._running |= set(ordinals)
        self._drawn += len(ordinals)

    def finish(self, ordinal: int) -> None:
        self._running.remove(ordinal)
        self._finished.append(ordinal)

    def takeable(self) -> list[int] | None:
        return self._finished[: self._batch] if len(self._finished) >= self._batch else None

    def take(self) -> list[int]:
        taken = self.takeable() or []
        self._running, self._finished = set(), []
        return taken

    def release(self) -> None:
        self._drawn = 0
        self.version += 1


@dataclass
class Workload:
    """Engines, response lengths and durations."""

    sigma: float
    prompts: int = 32
    samples: int = 8
    median_tokens: float = 1097.0
    longest: int = 16384
    engines: int = 4
    slots: int = 64
    step_s: float = 8e-3
    step_per_request_s: float = 0.12e-3
    refit_s: float = 2.0
    seed: int = 0

    def lengths(self, ordinal: int) -> list[int]:
        """Tokens of each response to a draw, determined by the draw alone."""
        generator = np.random.default_rng((self.seed, ordinal))
        drawn = generator.lognormal(np.log(self.median_tokens), self.sigma, self.samples)
        return np.clip(drawn, 1, self.longest).astype(int).tolist()


@dataclass
class EngineInTime:
    """Decodes all running responses token by token; the oldest draw is admitted first."""

    work: Workload
    now: float = 0.0
    waiting: list[tuple[int, int, float]] = field(default_factory=list)
    running: list[tuple[float, int]] = field(default_factory=list)
    """A heap of running responses: the engine's token count at which each ends, and its draw."""
    decoded: float = 0.0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def step_s(self) -> float:
        return self.work.step_s + self.work.step_per_request_s * len(self.running)

    def next_end(self) -> float:
        return self.now + (self.running[0][0] - self.decoded) * self.step_s if self.running else float("inf")

    def run_until(self, now: float) -> None:
        self.decoded += (now - self.now) / self.step_s if self.running else 0.0
        self.now = now

    def keep(self, ordinals: Collection[int]) -> None:
        """Abort the responses to all other draws."""
        self.waiting = [each for each in self.waiting if each[0] in ordinals]
        self.running = [each for each in self.running if each[1] in ordinals]
        heapq.heapify(self.waiting)
        heapq.heapify(self.running)

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.work.slots:
            ordinal, _, tokens = heapq.heappop(self.waiting)
            heapq.heappush(self.running, (self.decoded + tokens, ordinal))


@dataclass
class Outcome:
    """The result of a run."""

    step_s: float
    trained_tokens: float
    drawn_tokens: float
    """Mean length of the responses to all draws up to the newest that was trained on."""
    staleness: float
    oldest: int


class Simulation:
    """A run of a rule over a workload, in virtual time."""

    def __init__(self, compared: "Compared", work: Workload, train_s: float) -> None:
        self._rule, self._waits, self._in_turns = compared
        self._work, self._train_s = work, train_s
        self._engines = [EngineInTime(work) for _ in range(work.engines)]
        self._left: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._drawn, self._newest = 0, -1
        self._numbers = count()
        self._now = 0.0

    def run(self, steps: int) -> Outcome:
        """Run `steps` steps; the first quarter, in which the engines fill up, is not measured."""
        first, times, trained, ages = steps // 4, list[float](), list[int](), list[int]()
        self._admit()
        for step in range(steps):
            self._until(lambda: self._rule.takeable() is not None)
            batch = self._rule.take()
            unfinished = frozenset(self._rule.unfinished)
            for engine in self._engines:
                engine.keep(unfinished)
            self._newest = max(self._newest, *batch)
            ages += [self._rule.version - self._versions[each] for each in batch] if step >= first else []
            trained += [tokens for each in batch for tokens in self._work.lengths(each)]
            if self._in_turns:
                self._rest(self._train_s)
            else:
                self._pass(self._train_s)
            if self._waits:
                self._until(lambda: not self._rule.unfinished)
            self._rest(self._work.refit_s)
            self._rule.release()
            self._admit()
            times.append(self._now)
        drawn = [tokens for each in range(self._newest + 1) for tokens in self._work.lengths(each)]
        step_s = (times[-1] - times[first - 1]) / (steps - first)
        return Outcome(step_s, mean(trained), mean(drawn), mean(ages), max(ages))

    def _admit(self) -> None:
        while self._rule.admissible > 0:
            ordinal = self._drawn
            self._drawn += 1
            self._rule.admit([ordinal])
            self._versions[ordinal] = self._rule.version
            self._left[ordinal] = self._work.samples
            for tokens in self._work.lengths(ordinal):
                engine = min(self._engines, key=lambda each: each.load)
                heapq.heappush(engine.waiting, (ordinal, next(self._numbers), tokens))
                engine.fill()

    def _until(self, reached: "Condition") -> None:
        while not reached():
            self._next(float("inf"))

    def _rest(self, seconds: float) -> None:
        self._now += seconds
        for engine in self._engines:
            engine.now = self._now

    def _pass(self, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._next(end)

    def _next(self, limit: float) -> None:
        """Advance to the end of the next response, or to the limit."""
        engine = min(self._engines, key=EngineInTime.next_end)
        self._now = min(limit, engine.next_end())
        for each in self._engines:
            each.run_until(self._now)
        if self._now == limit:
            return
        _, ordinal = heapq.heappop(engine.running)
        engine.fill()
        self._left[ordinal] -= 1
        if not self._left[ordinal]:
            self._rule.finish(ordinal)
            self._admit()


class Condition(Protocol):
    """A condition to wait for."""

    def __call__(self) -> bool: ...


class Compared(NamedTuple):
    """A rule, and how it is run.

    Example: Compared(Schedule(32, max_staleness=1), waits=True)
    """

    rule: Rule
    waits: bool = False
    """Whether a refit waits for requests in flight."""
    in_turns: bool = False
    """Whether the engines wait while the trainer trains."""


def rules(prompts: int) -> Mapping[str, Compared]:
    """The rules that are compared, by name."""
    return {
        "S=0, synchronous": Compared(Schedule(prompts)),
        "S=1, wait": Compared(Schedule(prompts, 1), waits=True),
        "S=1": Compared(Schedule(prompts, 1)),
        "S=2": Compared(Schedule(prompts, 2)),
        "S=2, window 29": Compared(Schedule(prompts, 2, 29)),
        "S=4": Compared(Schedule(prompts, 4)),
        "S=1, in turns": Compared(Schedule(prompts, 1), in_turns=True),
        "S=2, in turns": Compared(Schedule(prompts, 2), in_turns=True),
        "first finished, 1": Compared(FirstFinished(prompts, 1, discard=False)),
        "first finished, 2": Compared(FirstFinished(prompts, 2, discard=False)),
        "discard what is old, 2": Compared(FirstFinished(prompts, 2, discard=True)),
        "over-sample by half": Compared(OverSampled(prompts, prompts * 3 // 2)),
    }


def rollout_seconds(work: Workload, steps: int) -> float:
    """Mean seconds that the engines alone need for a batch."""
    simulation = Simulation(Compared(Schedule(work.prompts)), Workload(**{**vars(work), "refit_s": 0.0}), 0.0)
    return simulation.run(steps).step_s


def table(sigma: float, share: float, steps: int) -> tuple[list[str], dict[str, float]]:
    """Rows for one length distribution, and the speedup of each rule."""
    work = Workload(sigma)
    train_s = share * rollout_seconds(work, steps)
    rows, gains, sync = list[str](), dict[str, float](), 0.0
    for name, compared in rules(work.prompts).items():
        outcome = Simulation(compared, work, train_s).run(steps)
        sync = sync or outcome.step_s
        gains[name] = sync / outcome.step_s
        lengths = outcome.trained_tokens / outcome.drawn_tokens
        rows.append(
            f"| {sigma} | {name} | {outcome.step_s:.0f} | {gains[name]:.2f} | {lengths:.3f} | {outcome.staleness:.2f} "
            f"| {outcome.oldest} | {compared.rule.staleness_bound} |"
        )
    return rows, gains


def draw(gains: Mapping[float, Mapping[str, float]], file: Path) -> None:
    """Write the plot of the speedups, with engines and trainer on separate GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    apart = [name for name in next(iter(gains.values())) if not name.endswith("in turns")]
    for name in apart:
        style = "--" if name.startswith(OTHERS) else "-"
        axes.plot(list(gains), [each[name] for each in gains.values()], style, marker="o", markersize=3, label=name)
    axes.set(xlabel="tail of the lengths (sigma of the log-normal)", ylabel="steps a second, of synchronous ones")
    figure.legend(fontsize=7, loc="outside right", title="dashed: rules of others", title_fontsize=7)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigmas", type=float, nargs="+", default=list(SIGMAS), help="tails of the lengths")
    parser.add_argument("--train-share", type=float, default=0.5, help="seconds of training, of those of a rollout")
    parser.add_argument("--steps", type=at_least_one, default=60)
    parser.add_argument("--plot", type=Path, help=f"where to draw them, as {PLOT.relative_to(ROOT)} is")
    arguments = parser.parse_args()
    print(f"{describe(ROOT)}\n")
    print("| sigma | schedule | s a step | x | length trained / drawn | staleness, mean | oldest | bound |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    gains = {}
    for sigma in arguments.sigmas:
        rows, gains[sigma] = table(sigma, arguments.train_share, arguments.steps)
        print("\n".join(rows), flush=True)
    if arguments.plot:
        draw(gains, arguments.plot)


if __name__ == "__main__":
    main()
