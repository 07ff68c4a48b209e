"""A timeline of one step: what the controller, the ranks, the engines and the reward workers did, and when."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from converters.durable import complete
from megarl.cluster.colocation import GpuSharing, OwnGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Worker
from megarl.output.places import PROFILES
from megarl.process.profiler import Profiler, TimelineEvent
from megarl.rewards.scorer import Scorer


class Timeline:
    """Writes what all processes do in the step that `tracking.profile` names."""

    def __init__(
        self,
        step: int | None,
        output_dir: Path,
        workers: Sequence[Worker],
        engines: EngineGroup | None,
        scorer: Scorer | None,
        gpus: GpuSharing | None = None,
    ) -> None:
        """`workers` are the processes that are neither engines nor reward workers, `gpus` those of the engines."""
        self._step, self._folder = step, output_dir / PROFILES
        self._workers, self._engines, self._scorer = workers, engines, scorer
        self._gpus = gpus or OwnGpus()

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record what is inside if this is the step; nothing is written where it fails."""
        if step != self._step:
            yield
            return
        controller = Profiler()
        wait([worker.begin_start_profiler() for worker in self._workers])
        if self._scorer:
            self._scorer.start_noting()
        controller.start()
        try:
            if self._engines:
                # A step begins with their turn anyway, and some cannot be called in that of the trainer.
                self._gpus.switch_to(self._engines)
                self._engines.start_profiler()
            yield
        finally:
            # Also where the step fails: a run that goes on in this process may come to record it again.
            found = {"controller": controller.stop()}
        events = wait([worker.begin_stop_profiler() for worker in self._workers])
        found |= {worker.log.stem: of_worker for worker, of_worker in zip(self._workers, events, strict=True)}
        if self._engines:
            # A refit that is checked by log-probs ends with the trainer's turn.
            self._gpus.switch_to(self._engines)
            found |= self._engines.stop_profiler()
        if self._scorer:
            found["reward workers"] = _rewards(self._scorer)
        self._write(found)

    def _write(self, found: Mapping[str, Sequence[TimelineEvent]]) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step_{self._step}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({"traceEvents": list(_of_processes(found)), "displayTimeUnit": "ms"}))
        complete(partial, path)
        print(f"the timeline of step {self._step} is in {path}: open it at ui.perfetto.dev", flush=True)


def _of_processes(found: Mapping[str, Sequence[TimelineEvent]]) -> Iterator[TimelineEvent]:
    """The events of each process, by its name, beginning at 0."""
    begin = min((event["ts"] for events in found.values() for event in events), default=0.0)
    for number, (name, events) in enumerate(found.items()):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        yield from ({**event, "pid": number, "ts": event["ts"] - begin} for event in events)


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
