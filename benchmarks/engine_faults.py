"""Engine faults: seconds from an abort to silence, and from an engine's death to a token elsewhere and to its return.

All engines are vLLM with a tiny Qwen3. Aborts are tested on one in this process. Deaths are SIGKILLs of one of the two
engines of a training job, while its other engine and its rank live on: the job's own router and restarts handle them.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread

import ray
from machine import at_least_one, describe, give_out

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.engine_heartbeats import INTERVAL_S
from megarl.cluster.engines.engines import Engines
from megarl.cluster.engines.pending_request import PendingRequest
from megarl.config.compose import compose
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.protocol import Event, Request, RequestEnded, SamplingParameters
from megarl.rollout.vllm.engine import VllmEngine
from megarl.run.job import Job, open_job
from megarl.run.opening import RunSetup

_FIRST, _PROMPT = 10, range(10, 42)
_LENGTH, _TOKENS = 512, 440
_SAMPLED_S = 0.2
"""How long requests are sampled before a fault, and how long an engine must be silent after an abort."""
_POLL_S = 0.002
_LIMIT_S = 300.0
_PARTS = ("process up", "model loaded", "refitted", "first token")


def main() -> None:
    """Print the figures, or write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=at_least_one, default=32, help="in flight at a fault")
    parser.add_argument("--aborts", type=at_least_one, default=100)
    parser.add_argument("--deaths", type=at_least_one, default=5)
    parser.add_argument("--output", type=Path, help="the Markdown file to write")
    options = parser.parse_args()
    machine = describe(Path.cwd())
    with TemporaryDirectory() as folder:
        model = write_tiny_model("qwen3", Path(folder) / "model", seed=0)
        aborts = _aborts(model, options.requests, options.aborts)
        with _job(Path(folder), model, options.deaths) as job:
            job.refit(0)
            deaths = [_death(job, options.requests, number % len(job.engines)) for number in range(options.deaths)]
    give_out(_page(machine, options.requests, aborts, deaths), options.output)


def _requests(count: int) -> list[Request]:
    # Greedy and with different prompts, as few such responses end before their limit.
    sampling = SamplingParameters(temperature=0.0, max_tokens=_TOKENS)
    return [Request([_FIRST + place, *_PROMPT], sampling, priority=place) for place in range(count)]


def _aborts(model: Path, requests: int, rounds: int) -> list[float]:
    """Seconds from each abort of everything in flight to the last event."""
    engine = VllmEngine(model, {"max_model_len": _LENGTH})
    engine.start()
    heard: SimpleQueue[tuple[float, Sequence[Event]]] = SimpleQueue()
    listener = Thread(target=_listen, args=(engine, heard), daemon=True)
    listener.start()
    try:
        return [_abort(engine, heard, range(number * requests, (number + 1) * requests)) for number in range(rounds)]
    finally:
        engine.close()
        listener.join()


def _listen(engine: VllmEngine, heard: "SimpleQueue[tuple[float, Sequence[Event]]]") -> None:
    for events in engine.events():
        heard.put((time.perf_counter(), events))


def _abort(engine: VllmEngine, heard: "SimpleQueue[tuple[float, Sequence[Event]]]", numbers: range) -> float:
    engine.submit(dict(zip(numbers, _requests(len(numbers)), strict=True)))
    time.sleep(_SAMPLED_S)
    began_s = time.perf_counter()
    engine.abort(numbers)
    left, cut, last_s = set(numbers), 0, began_s
    while True:
        try:
            at_s, events = heard.get(timeout=_SAMPLED_S)
        except Empty:
            break
        last_s = max(last_s, at_s)
        for event in events:
            if isinstance(event, RequestEnded):
                left.remove(event.number)
                cut += isinstance(event.answer, list) and event.answer[0].finish_reason == "abort"
    if left or not cut:
        raise SystemExit(f"of {len(numbers)} requests that were aborted {cut} were cut, and {len(left)} have not ended")
    return last_s - began_s


@contextmanager
def _job(folder: Path, model: Path, deaths: int) -> Iterator[Job]:
    files = write_arithmetic(folder / "data", held_out=16)
    overrides = [
        f"output_dir={folder / 'run'}",
        f"model.path={model}",
        f"data.train_files=[{files.train}]",
        f"data.eval_files=[{files.eval}]",
        "megatron.expert_model_parallel_size=1",
        "cluster.trainer_ranks=1",
        "rollout.replicas=2",
        f"rollout.engine_args.max_model_len={_LENGTH}",
        f"cluster.max_engine_restarts={deaths}",
        "cluster.engine_threads=1",
        "tracking.loggers=[]",
    ]
    with open_job(RunSetup.read(compose("quickstart", overrides), "train")) as job:
        yield job


def _death(job: Job, requests: int, number: int) -> Mapping[str, float]:
    """Kill an engine; return seconds until it is noticed, until a request gets tokens elsewhere, and to its return."""
    engines, handle = job.engines, job.engines.handles[number]
    asked = engines.begin_generate(_requests(requests))
    _until(lambda: all(_tokens(engines, each) for each in asked), engines)
    time.sleep(_SAMPLED_S)
    worker = handle.worker
    own = [each for each in asked if each.worker is worker and not each.answer.done()]
    if not own:
        raise SystemExit(f"{handle.name} has nothing in flight: raise --requests")
    pid = ray.get(worker.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    began_s = time.perf_counter()
    seconds = {"seen": _until(lambda: all(each.worker is not worker for each in own), engines) - began_s}
    seconds["first token elsewhere"] = _until(lambda: any(_has_moved(engines, each) for each in own), engines) - began_s
    at_s = _return(engines, handle)
    for each in asked:
        each.answer.result(_LIMIT_S)
    return seconds | {part: at - began_s for part, at in zip(_PARTS, at_s, strict=True)}


def _return(engines: Engines, handle: EngineHandle) -> list[float]:
    """Times when its new process is up, the model is loaded, the weights have arrived, and the first token comes."""
    _until(lambda: handle.state == "restarting" or handle.is_up, engines)
    up = handle.worker.begin_node().reference
    at_s = [_until(lambda: ray.wait([up], timeout=0)[0], engines)]
    at_s.append(_until(lambda: handle.is_up, engines))
    at_s.append(_until(lambda: handle.state == "serving", engines))
    alone = engines.only(engines.handles.index(handle))
    (first,) = alone.begin_generate(_requests(1))
    at_s.append(_until(lambda: _tokens(alone, first), engines))
    first.answer.result(_LIMIT_S)
    return at_s


def _tokens(engines: Engines, asked: PendingRequest) -> int:
    """The number of tokens reported for a request."""
    return sum(len(turn.token_ids) for turn in engines.partial_turns([asked])[0].values())


def _has_moved(engines: Engines, asked: PendingRequest) -> bool:
    """Whether a request has more tokens, elsewhere, than the dead engine had reported."""
    begun = sum(len(each.token_ids) for each in asked.begun.values())
    return asked.answer.done() or (asked.worker is not None and _tokens(engines, asked) > begun)


def _until(is_so: Callable[[], object], engines: Engines) -> float:
    """The time at which a condition became true; meanwhile engines are restarted at the pace of a run."""
    began_s = looked_s = time.perf_counter()
    while not is_so():
        now_s = time.perf_counter()
        if now_s - began_s > _LIMIT_S:
            raise SystemExit(f"nothing came of it in {_LIMIT_S:g} s")
        if now_s - looked_s >= INTERVAL_S:
            engines.recover()
            looked_s = time.perf_counter()
        else:
            time.sleep(_POLL_S)
    return time.perf_counter()


def _page(machine: str, requests: int, aborts: Sequence[float], deaths: Sequence[Mapping[str, float]]) -> str:
    columns = {name: [each[name] for each in deaths] for name in deaths[0]}
    return "\n".join(
        [
            "# Faults of engines",
            "",
            f"`make benchmark-engine-faults`, {date.today()}, {machine}; behind the last {os.getloadavg()[0]:.1f}.",
            f"A tiny Qwen3 in vLLM engines of one thread, {requests} requests in flight.",
            "",
            "## From an abort to silence",
            "",
            f"All requests in flight are aborted, {len(aborts)} times; nothing is heard of them behind that.",
            "",
            "| | median | 9 of 10 | worst |",
            "|---|---:|---:|---:|",
            f"| ms | {1e3 * median(aborts):.1f} | {1e3 * sorted(aborts)[int(0.9 * (len(aborts) - 1))]:.1f}"
            f" | {1e3 * max(aborts):.1f} |",
            "",
            "## From a death",
            "",
            f"One of two engines of a job is killed, {len(deaths)} times; all in seconds after that. A run looks after"
            f" engines that come back every {INTERVAL_S:g} s.",
            "",
            "| | median | worst |",
            "|---|---:|---:|",
            *(f"| {name} | {median(each):.2f} | {max(each):.2f} |" for name, each in columns.items()),
            "",
        ]
    )


if __name__ == "__main__":
    main()
