"""A timeline of one step, of controller, ranks, engines and reward workers, for Perfetto."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from converters.durable import whole_file
from megarl.cluster.colocation import GpuSharing, OwnGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Worker
from megarl.output.places import PROFILES
from megarl.process.profiler import Profiler, TimelineEvent, encoded
from megarl.rewards.scorer import Scorer

_MOST_RANKS = 16
"""A model with at most this many ranks has all of them in the timeline."""
_MOST_EVENTS = 2_000_000
"""Limit of the events of all ranks, and again of all engines: about 600 MB in all, in memory of the controller.

In the largest step that was counted, a rank had 0.3 million events and each worker of an engine 4 million.
"""


def recorded_ranks(groups: Sequence[TrainerGroup]) -> list[Worker]:
    """The ranks in the timeline: all ranks of a small model, otherwise those with data-parallel rank 0.

    The others do the same work on other sequences, and nobody reads thousands of timelines.
    """
    return [
        worker
        for group in groups
        for rank, worker in enumerate(group.workers)
        if len(group.workers) <= _MOST_RANKS or group.parallel.data_parallel_rank(rank) == 0
    ]


class Timeline:
    """Records the processes during the step that `tracking.profile` names, and writes the timeline."""

    def __init__(
        self,
        step: int | None,
        output_dir: Path,
        workers: Sequence[Worker],
        engines: EngineGroup | None,
        scorer: Scorer | None,
        gpus: GpuSharing | None = None,
    ) -> None:
        """`workers` are the `recorded_ranks`; `gpus` is the time-sharing with engines, if any."""
        self._step, self._folder = step, output_dir / PROFILES
        self._workers, self._engines, self._scorer = workers, engines, scorer
        self._gpus = gpus or OwnGpus()

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record the block if `step` is the one to profile; writes nothing if the block fails."""
        if step != self._step:
            yield
            return
        controller, since_us = Profiler(), 1e6 * time.time()
        of_rank = _MOST_EVENTS // max(len(self._workers), 1)
        wait([worker.begin_start_profiler() for worker in self._workers])
        if self._scorer:
            self._scorer.start_noting()
        controller.start()
        try:
            if self._engines:
                # A step begins with the engines' turn anyway, and some cannot be called during the trainer's.
                self._gpus.switch_to(self._engines)
                self._engines.start_profiler()
            yield
        finally:
            # Also if the step fails: the run may resume in this process and record the step again.
            found = {"controller": controller.stop(of_rank, since_us)}
        events = wait([worker.begin_stop_profiler(of_rank, since_us) for worker in self._workers])
        found |= {worker.log.stem: of_worker for worker, of_worker in zip(self._workers, events, strict=True)}
        if self._engines:
            # A refit that is verified by log-probs ends with the trainer's turn.
            self._gpus.switch_to(self._engines)
            found |= self._engines.stop_profiler(_MOST_EVENTS, since_us)
        if self._scorer:
            found["reward workers"] = encoded(_rewards(self._scorer), of_rank, since_us)
        self._write(found)

    def _write(self, found: Mapping[str, bytes]) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step_{self._step}.json"
        with whole_file(path) as partial, partial.open("wb") as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, part in enumerate(_of_processes(found)):
                file.write(b",\n" + part if number else part)
            file.write(b"\n]}\n")
        print(f"the timeline of step {self._step} is in {path}: open it at ui.perfetto.dev", flush=True)


def _of_processes(found: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the events of each process, under its name, as JSON text: parsing millions of events would take minutes."""
    for number, (name, events) in enumerate(found.items()):
        for about, value in (("name", name), ("sort_index", number)):
            said = {"ph": "M", "name": f"process_{about}", "pid": number, "args": {about: value}}
            yield json.dumps(said).encode()
        if events:
            # JSON strings contain no line breaks, so this only matches between events.
            own = f'{{"pid": {number}, '.encode()
            yield own + events[1:].replace(b"\n{", b",\n" + own)


def _rewards(scorer: Scorer) -> list[TimelineEvent]:
    return [
        {
            "name": "score",
            "cat": "reward",
            "ph": "X",
            "tid": each.process,
            "ts": 1e6 * each.start_s,
            "dur": 1e6 * (each.end_s - each.start_s),
            "args": {},
        }
        for each in scorer.stop_noting()
    ]
