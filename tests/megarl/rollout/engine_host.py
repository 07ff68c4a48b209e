"""Engines in a process of their own: vLLM changes torch's threads and random state of the process it runs in."""

import functools
import gc
import ipaddress
import json
import multiprocessing
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.managers import BaseManager, IteratorProxy
from pathlib import Path

import psutil
from safetensors.torch import load_file
from transfer_ranks import start_fork_server

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from megarl.quickstart.tiny_models import END, make_tokenizer
from megarl.resharding.loader.buckets import Quantised, cut_into_buckets, views
from megarl.resharding.shared_memory import Segment
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.vllm.arguments import prepare_environment
from megarl.rollout.vllm.engine import VllmEngine

SEGMENT_BYTES = 600_000
PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], [2, 11, 12, 30, 31, 3], [33] * 20]
GREEDY = SamplingParameters(temperature=0, max_tokens=16)
END_ID = make_tokenizer().convert_tokens_to_ids(END)


class EngineHost(BaseManager):
    """Serves every proxy call of every thread in a thread of its own, as an actor with concurrency does."""


def make_engine(*arguments):
    """An engine that leaves what vLLM has imported out of its searches for garbage; the one before it took it in."""
    gc.freeze()
    return VllmEngine(*arguments)


EngineHost.register("stream", proxytype=IteratorProxy, create_method=False)
EngineHost.register("engine", make_engine, method_to_typeid=dict.fromkeys(("generate_stream", "events"), "stream"))


def with_vllm():
    """A context of multiprocessing whose processes are forked from one that has vLLM."""
    start_fork_server("load_vllm")
    return multiprocessing.get_context("forkserver")


def vllm_pool():
    """A process of its own that has vLLM and no engine.

    Not waited for at the end, as a ProcessPoolExecutor is: vLLM's process takes seconds to end by itself.
    """
    return with_vllm().Pool(1, initializer=prepare_environment)


class Engines:
    """Starts engines, one at a time; `make` takes a folder and arguments, among which are the `usual` ones."""

    def __init__(self, make, **usual):
        self._make, self._usual = make, usual
        self.running = None

    def start(self, folder, **engine_args):
        self.close()
        self.running = self._make(folder, {**self._usual, **engine_args})
        self.running.start()
        return self.running

    def close(self):
        if self.running is not None:
            self.running.close()
            self.running = None


class HostedEngines(Engines):
    """Engines of one host process, which holds one at a time."""

    def __init__(self, host):
        super().__init__(host.engine, max_model_len=512, kv_cache_memory_bytes=2**27)
        self._host = host

    def processes(self):
        return psutil.Process(self._host._process.pid).children(recursive=True)


@contextmanager
def running_engines() -> Iterator[HostedEngines]:
    host = EngineHost(ctx=with_vllm())
    host.start()
    engines = HostedEngines(host)
    try:
        yield engines
        engines.close()
    finally:
        host.shutdown()


def check_that_they_listen_here_alone(processes):
    addresses = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)


def semaphores(processes):
    """Files of the semaphores that processes have mapped; a map has another name than its file."""
    maps = [line.split() for each in processes for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
    mapped = {int(fields[4]) for fields in maps if "/dev/shm/sem." in " ".join(fields)}
    return {path for path in Path("/dev/shm").glob("sem.*") if path.stat().st_ino in mapped}


class Weights:
    """The tensors of a HuggingFace folder, cut into small buckets; for an engine in a number format, its codes."""

    def __init__(self, folder, number_format=None, as_values=()):
        self.tensors = load_file(folder / "model.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        self.names = list(shapes)
        quantised = None
        if number_format is not None:
            names = number_format.quantised_names(read_architecture(read_json(folder / CONFIG)))
            as_values = names if number_format.elements_per_code > 1 else as_values
            quantised = Quantised(number_format, names, as_values)
            for name in names - set(as_values):
                codes, scales = number_format.quantise(self.tensors[name])
                self.tensors |= {name: codes, number_format.scales_name(name): scales}
        self.buckets = cut_into_buckets(shapes, dtypes, SEGMENT_BYTES, quantised=quantised)


class Served:
    """A running engine, connected to two segments, and two models to try it with: `folders`, `first`, `second`."""

    def __init__(self, engine, folders, number_format=None):
        self.engine = engine
        self.folders = folders
        self.first, self.second = (Weights(folder, number_format) for folder in folders)
        segments = [Segment(SEGMENT_BYTES) for _ in range(2)]
        self._memories = [segment.memory for segment in segments]
        engine.map_segments([segment.handle() for segment in segments], SEGMENT_BYTES)
        for segment in segments:
            segment.close()

    def write(self, weights, bucket):
        for name, view in views(bucket, self._memories[bucket.segment]).items():
            view.copy_(weights.tensors[name])
        self.engine.write(bucket)
        # The engine must have taken what it needs: the segment belongs to the next bucket now.
        self._memories[bucket.segment].fill_(255)

    def update(self, weights, version, kv="recompute"):
        self.engine.begin_update(version, weights.names)
        for bucket in weights.buckets:
            self.write(weights, bucket)
        return self.engine.commit_update(version, kv)

    def greedy(self, prompt):
        return self.engine.generate([Request(prompt, GREEDY)])[0][0]


@functools.cache
def queueing(folders):
    """An engine that has begun a batch when it gives the tokens of the one before, as those on GPUs have.

    A process has one, for all that is tried with it: each begins with an update, and leaves the engine awake.
    """
    engine = VllmEngine(folders[0], {"max_model_len": 512, "kv_cache_memory_bytes": 2**27})
    engine.start()
    # vLLM turns it on for asynchronous scheduling, which no CPU has, and pipeline stages.
    core = engine._core._client.engine_core
    core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
    core.step_fn = core.step_with_batch_queue
    return Served(engine, folders)


def check_that_messages_are_recorded(trainer, engine, workers):
    """Look that a timeline has what every worker of an engine, a process of its own, does in a refit."""
    engine.start_profiler()
    trainer.update(engine.version() + 1)
    recorded = engine.stop_profiler(10**6, 0.0)
    assert list(recorded) == [f"worker {number}" for number in range(workers)]
    for number, lines in enumerate(recorded.values()):
        events = [json.loads(line) for line in lines.splitlines()]
        written = [each for each in events if each["name"] == "write a message"]
        incoming = trainer.spec.incoming(number)
        expected = [*incoming.direct.values(), *incoming.relays_in.values()]
        assert len(written) == sum(map(len, expected)) > 1
        assert {each["cat"] for each in written} == {"user_annotation"}
    # The next time nothing of it is told again, and nothing of who was not asked to record.
    assert engine.stop_profiler(10**6, 0.0) == {}


def check_that_changes_any_serving(trainer, served, assert_greedy, transport="shared_memory"):
    """Look that an engine serves what came whole, as changes, and by its loader; the trainer keeps the second model."""
    trainer.connect(transport=transport, with_changes=True)
    folders, moved = served.folders, []
    # Everything, changes, and next to none.
    for folder in (folders[1], folders[0], folders[0]):
        trainer.load(folder)
        moved.append(trainer.update(served.engine.version() + 1))
        assert_greedy(folder, PROMPTS[0], served.greedy(PROMPTS[0]))
    assert moved[0] > moved[1] > 20 * moved[2]
    trainer.load(folders[1])
    # Through the loader again, over what was written, and directly over that.
    served.update(served.first, served.engine.version() + 1)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
