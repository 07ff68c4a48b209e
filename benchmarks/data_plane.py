"""Cost of a step's data in the controller: processing, memory and bytes sent. Nothing is sampled or computed.

The data take the path of a training run: turns stream out of an engine, become a batch, go to the ranks of all
data-parallel shares, and come back as log-probs. Engine and ranks are two processes that return made-up numbers; the
second one stands for all ranks in turn.
"""

import argparse
import gc
import importlib.metadata
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from machine import at_least_one, describe

from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import PolicyObjective
from megarl.cluster.placement.placement import Role
from megarl.cluster.placement.reservation import Seats, reserve
from megarl.cluster.placement.roles import ENGINE, POLICY, engine_role, trainer_role
from megarl.cluster.ray.runtime import ray_cluster
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.streams import Stream, results_of
from megarl.cluster.workers.worker import Worker
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.models.auxiliary import AuxiliaryModels
from megarl.rewards import Score
from megarl.schema import AlgorithmConfig, ClusterConfig, MegarlConfig, RolloutConfig
from megarl.stages.advantage import with_advantages
from megarl.stages.batch import mini_batches, to_batch
from megarl.stages.metrics import step_metrics
from megarl.stages.model_outputs import with_model_outputs
from megarl.stages.update import update_policy
from megatron_ext.options.options import MegatronOptions

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 16
PROMPT_TOKENS = 64
STORE_BYTES_PER_TOKEN = 160
_POLL_S = 0.005


@dataclass(frozen=True)
class Phase:
    """Cost of one phase of the step in the controller."""

    name: str
    cpu_seconds: float
    peak_bytes: int


@dataclass
class Stopwatch:
    """The controller's CPU seconds and its peak private memory, by phase.

    Shared memory, such as the object store, is not included, nor are the bytes held `before` the first step.
    """

    before: int
    phases: list[Phase] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the code inside the context."""
        ended, peak = threading.Event(), _own_bytes()

        def sample() -> None:
            nonlocal peak
            while not ended.wait(_POLL_S):
                peak = max(peak, _own_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        start = time.process_time()
        try:
            yield
        finally:
            seconds = time.process_time() - start
            ended.set()
            sampler.join()
        self.phases.append(Phase(name, seconds, max(peak, _own_bytes()) - self.before))


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Consumers(TrainerGroup):
    """A group of Megatron ranks in a single process."""

    def __init__(self, sizes: ParallelSizes, max_tokens: int, seats: Seats, logs: Path) -> None:
        super().__init__(MegatronOptions(ParallelSizes(), torch.float32), ClusterConfig(), seats, logs, max_tokens)
        wait([self.workers[0].begin_make("data_plane_workers", "Ranks")])
        self.workers *= sizes.world_size
        self._parallel = sizes
        self._options = MegatronOptions(sizes, torch.float32)

    def counted(self) -> dict[str, list[int]]:
        """See `Ranks.counted`."""
        return wait([self.workers[0].begin("counted")])[0]


def sample(engine: Worker, responses: int, tokens: int) -> list[PromptGroup]:
    """Scored groups of an engine's turns; half of the responses are right."""
    prompt = [5] * PROMPT_TOKENS
    stream = Stream.begin(engine, "generate_each", [prompt] * (responses // SAMPLES), SAMPLES, tokens)
    return [
        PromptGroup(Prompt(place, "made up", prompt, "", {}), place, [_scored(*each) for each in enumerate(turns)])
        for _, (place, turns) in results_of([stream])
    ]


def _scored(number: int, turn: Turn) -> Trajectory:
    return Trajectory((turn,), turn.finish_reason, Score(float(number % 2), {}, {"score": float(number % 2)}))


def step(
    engine: Worker, trainer: Consumers, config: MegarlConfig, responses: int, tokens: int, watch: Stopwatch
) -> int:
    """Run one step as `megarl.train.train_step` does, measured by `watch`; return its number of tokens."""
    objective = PolicyObjective(config.algorithm)
    with watch.phase("turns of the engine"):
        groups = sample(engine, responses, tokens)
    with watch.phase("batch"):
        batch = trainer.place(to_batch(groups, config.algorithm))
    with watch.phase("log-probs calls (old, reference)"):
        batch = with_model_outputs(batch, groups, trainer, AuxiliaryModels(), objective, config)
    with watch.phase("advantages, mini-batches"):
        batch = with_advantages(batch, groups, config, kl=None, kl_coefficient=0.0)
        batches = mini_batches(batch, groups, config)
    with watch.phase("update calls"):
        update_policy(trainer, batches, objective, temperature=1.0, seed=(0, 0))
    with watch.phase("metrics"):
        step_metrics(groups, groups, batch, 3, config)
    return batch.total_tokens


def report(sizes: ParallelSizes, tokens: int, watch: Stopwatch, counted: dict[str, list[int]], updates: int) -> str:
    """Return the tables of a step."""
    lines = ["| phase | controller, CPU s | its peak memory, MB |", "|---|---:|---:|"]
    lines += [f"| {each.name} | {each.cpu_seconds:.2f} | {each.peak_bytes / 1e6:,.0f} |" for each in watch.phases]
    total, peak = sum(each.cpu_seconds for each in watch.phases), max(each.peak_bytes for each in watch.phases)
    lines += [f"| **step** | **{total:.2f}** | **{peak / 1e6:,.0f}** |", ""]
    # Each data-parallel share goes to every rank that works on it; each optimizer step uses a part of the batch.
    copies = sizes.world_size // sizes.data_parallel_size
    lines += ["| call | bytes a token to a rank | bytes a token from all ranks |", "|---|---:|---:|"]
    for name in ("predictions", "train_step"):
        received, returned = counted[name]
        lines.append(f"| {name} | {received / copies / tokens:.2f} | {returned / tokens:.2f} |")
    return "\n".join([*lines, f"\n{updates} optimizer steps; {copies} ranks work on each share."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=at_least_one, default=4096, help=f"a multiple of {SAMPLES}")
    parser.add_argument("--tokens", type=at_least_one, default=8192, help="of a response, in the mean")
    parser.add_argument("--consumers", type=at_least_one, default=64, help="data-parallel shares")
    parser.add_argument("--tensor-parallel", type=at_least_one, default=2, help="ranks that work on each share")
    parser.add_argument("--updates", type=at_least_one, default=2, help="optimizer steps")
    options = parser.parse_args()
    if options.responses % SAMPLES:
        parser.error(f"--responses {options.responses} is no multiple of {SAMPLES}: a prompt has so many")
    torch.set_num_threads(1)
    print(f"Machine: {describe(ROOT)}\n\nVersions: torch {torch.__version__}, ray {importlib.metadata.version('ray')}")
    print(
        f"\n{options.responses:,} responses of {options.tokens:,} tokens, {options.consumers} data-parallel shares\n",
        flush=True,
    )
    sizes = ParallelSizes(
        world_size=options.consumers * options.tensor_parallel, tensor_model_parallel_size=options.tensor_parallel
    )
    algorithm = AlgorithmConfig(updates_per_step=options.updates, kl_coefficient=0.001)
    config = MegarlConfig(algorithm=algorithm)
    config.rollout.max_response_tokens = 2 * options.tokens
    store = max(256 * 1024**2, STORE_BYTES_PER_TOKEN * options.responses * options.tokens)
    with (
        tempfile.TemporaryDirectory() as logs,
        ray_cluster(ClusterConfig(object_store_bytes=store)),
        reserve(_roles(ClusterConfig()), ClusterConfig()) as seats,
    ):
        trainer = Consumers(sizes, 2 * options.tokens + PROMPT_TOKENS, seats[POLICY], Path(logs))
        engine = Worker(seats[ENGINE], 0, logs=Path(logs))
        wait([engine.begin_make("data_plane_workers", "Engine")])
        gc.collect()
        gc.freeze()  # as `megarl.run.opening.open_processes` does
        before = _own_bytes()
        # The first steps import modules, and touch memory of the object store for the first time.
        for _ in range(2):
            trainer.counted()
            watch = Stopwatch(before)
            tokens = step(engine, trainer, config, options.responses, options.tokens, watch)
        print(report(sizes, tokens, watch, trainer.counted(), options.updates))


def _roles(cluster: ClusterConfig) -> list[Role]:
    return [trainer_role(POLICY, ParallelSizes(), cluster), engine_role(cluster, RolloutConfig())]


if __name__ == "__main__":
    main()
