"""The controller at the size of a large run: thousands of trajectories in flight on scripted engines.

Engine processes, requests, events and scores are those of a run; there is no model, and nothing is trained. CPU time
includes all threads of the controller; memory is its own, while a run's controller also maps what it has read from
Ray's object store.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from machine import at_least_one, describe
from scripted_engine import ScriptedEngine

import megarl.rollout
from converters.gc_pause import gc_frozen
from megarl.cluster.colocation import OwnGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import ENGINE, engine_role
from megarl.cluster.ray.runtime import ray_cluster
from megarl.cluster.workers.calls import wait
from megarl.data import Prompt, PromptSampler
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import Scorer, reward_arguments
from megarl.rewards.scorer import Samples
from megarl.rollout.kind import EngineKind, EngineSizes
from megarl.run.checkpoint_files import at_once
from megarl.run.rollouts import Rollouts, RolloutWorkers
from megarl.run.schedule import Schedule
from megarl.schema import ClusterConfig, LoopConfig, MegarlConfig, RewardConfig, RolloutConfig, ScheduleConfig
from megarl.tracking.clock import Clock

ROOT = Path(__file__).resolve().parent.parent
ENGINES, SAMPLES = 4, 8
AT_ONCE = 16
"""Groups scored at the same time."""
REWARD = Path(__file__).with_name("length_reward.py")
SCRIPTED = EngineKind(
    title="scripted",
    engine_class=("scripted_engine", "ScriptedEngine"),
    argument_class=("scripted_engine", "ScriptedEngine"),
    refused={},
    tested={},
    offers=frozenset(),
    sizes=lambda _arguments: EngineSizes(1, None, "bf16"),
    context_argument="context",
    workers=lambda _arguments: 1,
    nodes=lambda _arguments: 1,
    part_class=None,
    part_arguments=lambda _number, _first: {},
    loopback_environment=MappingProxyType({"PYTHONPATH": ":".join(sys.path)}),
    without_weights={},
    float32_logits={},
    layout_versions=(),
    packages={},
)


@contextmanager
def controller(config: MegarlConfig) -> Iterator[Rollouts]:
    """The part of a run that samples."""
    loop, schedule = config.loop, config.schedule
    prompts = [Prompt(index, "any", [index % 100] * 32, "1", {}) for index in range(4096)]
    with (
        ray_cluster(replace(config.cluster, object_store_bytes=2 * 1024**3)),
        reserve([engine_role(config.cluster, config.rollout)], config.cluster) as seats,
        tempfile.TemporaryDirectory() as logs,
        Scorer(config.reward) as scorer,
        EngineGroup(config.rollout, seats[ENGINE], Path(logs)) as engines,
    ):
        engines.wait_started(engines.begin_start(Path("model"), load_weights=True))
        rollouts = Rollouts(
            config,
            prompts,
            PromptSampler(len(prompts), shuffle=True, seed=0),
            Schedule(loop.prompts_per_step, schedule.max_staleness),
            RolloutWorkers(engines, scorer, None, OwnGpus(), make_tokenizer(), ()),
        )
        with gc_frozen(collect=True):
            yield rollouts


def run_of(prompts: int, staleness: int, steps: int, **arguments: Any) -> MegarlConfig:
    """The configuration of a run whose engines get `arguments`."""
    return MegarlConfig(
        loop=LoopConfig(steps=steps, prompts_per_step=prompts, samples_per_prompt=SAMPLES),
        schedule=ScheduleConfig(max_staleness=staleness, in_flight="recompute"),
        rollout=RolloutConfig(engine="scripted", replicas=ENGINES, max_response_tokens=16384, engine_args=arguments),
        reward=RewardConfig(function=f"{REWARD}:score"),
        cluster=ClusterConfig(engine_cpus=0.1),
    )


def events(in_flight: int, groups: int, median_tokens: float, pace_s: float) -> str:
    """Keep `in_flight` trajectories in flight until `groups` groups are sampled; return CPU time per event, and memory.

    An event is new tokens of a response, or its end.
    """
    slots, prompts = in_flight // SAMPLES, 32

    def told() -> int:
        return sum(wait(rollouts._workers.engines.begin(ScriptedEngine.told)))

    config = run_of(prompts, slots // prompts - 1, 10**9, pace_s=pace_s * ENGINES, median_tokens=median_tokens)
    with controller(config) as rollouts:
        clock, own, memory = Clock(), psutil.Process(), []
        for step in range(groups // prompts):
            rollouts.take(clock)
            wait(rollouts._workers.engines.begin(ScriptedEngine.serve, step + 1))
            rollouts.note_refit()
            if step == slots // prompts:
                before = told()
                began, cpu = time.monotonic(), time.process_time()
            if step >= slots // prompts and step % 8 == 0:
                used = own.memory_info()
                memory.append(used.rss - used.shared)
        counted = (groups // prompts - slots // prompts - 1) * prompts
        cpu, seconds = time.process_time() - cpu, time.monotonic() - began
        responses = counted * SAMPLES
        heard = responses + told() - before
    third = max(1, len(memory) // 3)
    parts = memory[:1], memory[third : 2 * third], memory[2 * third :]
    costs = (f"{cpu / many * 1e3:.{digits}f}" for many, digits in ((heard, 4), (responses, 3), (counted, 2)))
    cells = (
        *(f"{in_flight:,}", f"{counted:,}", f"{median_tokens:.0f}", f"{counted / seconds:.0f}"),
        *(f"{heard / responses:.0f}", *costs, ", ".join(f"{max(part) / 1e6:.0f}" for part in parts)),
    )
    return f"| {' | '.join(cells)} |"


def checkpoint(groups: int, median_tokens: float) -> str:
    """Save with `groups` groups finished and as many others half sampled; return seconds and bytes."""
    each = groups // ENGINES
    config = run_of(groups, 1, 10**9, pace_s=0.0, median_tokens=median_tokens, only=each)
    with controller(config) as rollouts, tempfile.TemporaryDirectory(dir=ROOT) as folder:
        rollouts._admit()
        rollouts._wait(lambda: len(rollouts._schedule.waiting) == groups)
        while len(begun := begun_tokens(rollouts)) < groups * SAMPLES:
            time.sleep(0.1)
        tokens = sum(each.sampled_tokens for group in rollouts._finished.values() for each in group.trajectories)
        seconds = []
        for number in range(3):
            target = Path(folder) / str(number)
            target.mkdir()
            began = time.monotonic()
            state = rollouts.save(at_once(target))
            seconds.append(time.monotonic() - began)
        size = sum(path.stat().st_size for path in target.iterdir())
    assert len(state["schedule"]["draws"]) == 2 * groups
    saved = f"{tokens / 1e6:.2f} | {sum(begun) / 1e6:.2f} | {size / 1e6:.0f}"
    return f"| {groups} | {groups} | {saved} | {min(seconds):.2f} | {max(seconds):.2f} |"


def scoring(groups: int) -> str:
    """Score `groups` groups and nothing else; return the CPU time per group, the best of five rounds."""
    samples: Samples = {number: reward_arguments("any", "7" * 100, "1", {}, 100) for number in range(SAMPLES)}
    rounds = []
    with Scorer(RewardConfig(function=f"{REWARD}:score")) as scorer:
        for _ in range(5):
            cpu = time.process_time()
            for _ in range(groups // AT_ONCE):
                pending = [scorer.begin() for _ in range(AT_ONCE)]
                for each in pending:
                    each.add(samples)
                for each in pending:
                    each.finish()
            rounds.append((time.process_time() - cpu) / groups * 1e3)
    return f"| {groups} | {min(rounds):.2f} |"


def begun_tokens(rollouts: Rollouts) -> list[int]:
    """The number of tokens of each unfinished response."""
    partials = rollouts._in_flight.partials().values()
    return [len(turn.token_ids) for own in partials for each in own for turn in each.turns.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=at_least_one, default=4096, help="trajectories")
    parser.add_argument("--groups", type=at_least_one, default=10_000, help="sampled in all")
    parser.add_argument("--saved", type=at_least_one, default=512, help="groups that are finished when it is saved")
    parser.add_argument("--median-tokens", type=float, default=1097.0)
    parser.add_argument("--pace-ms", type=float, default=5.0, help="between two answers of all engines together")
    arguments = parser.parse_args()
    megarl.rollout.ENGINES["scripted"] = SCRIPTED  # type: ignore[index]
    print(f"{describe(ROOT)}; events of each response, CPU ms, MB at first, then at most in the last thirds\n")
    print(
        "| in flight | groups | median tokens | groups/s | events of each | ms an event | a response | a group | MB |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---|", flush=True)
    print(events(arguments.in_flight, arguments.groups, arguments.median_tokens, arguments.pace_ms / 1e3), flush=True)
    print("\n| groups scored alone | CPU ms a group, best of 5 |\n|---:|---:|", flush=True)
    print(scoring(400), flush=True)
    print("\n| groups finished | in flight | million tokens, finished | in flight | MB | s, best | s, worst |")
    print("|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    print(checkpoint(arguments.saved, arguments.median_tokens), flush=True)


if __name__ == "__main__":
    main()
