"""However many engines sample, and in whatever order their answers come: the same batches, and the same numbers."""

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import without_timings
from test_colocation import OF_SPEED, STEPS, exported, small

from megarl.cluster.engines.request_queue import RequestQueue
from megarl.cluster.workers.streams import Stream
from megarl.data import PromptGroup, Turn
from megarl.rollout.protocol import Event, RequestEnded
from megarl.run.job import Job, open_job
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig
from megarl.stages.rollout import requests_for, sampling_parameters
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")

OF_ENGINES = {"refit/bytes"}
"""Metrics that go with the number of engines."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "max_staleness", "replicas"),
    [("transformers", 0, (2, 3)), ("transformers", 1, (3,)), ("vllm", 0, (2,))],
    ids=["in turn", "one step off", "in turn with vLLM"],
)
def test_batches_and_numbers_are_those_of_one_engine(
    engine: str, max_staleness: int, replicas: Sequence[int], tmp_path: Path
) -> None:
    config = made(tmp_path, engine, max_staleness)
    expected, lines, weights, asked_at_once = run(config, tmp_path / "1")
    if not max_staleness:
        assert asked_at_once == [turns_of(groups) for groups in expected]
    for count in replicas:
        config.rollout.replicas = count
        groups, found, exports, _ = run(config, tmp_path / str(count), random.Random(count))
        assert [each.ordinal for batch in groups for each in batch] == list(range(STEPS * len(expected[0])))
        assert groups == expected
        assert [turns_of(each) for each in groups] == [turns_of(each) for each in expected]
        for line, own in zip(found, lines, strict=True):
            different = {name for name, value in own.items() if line.get(name) != value}
            assert {name for name in different if name in without_timings(own, *OF_SPEED)} <= OF_ENGINES
            # Rewards of groups that come early are there before the trainer would wait for them.
            assert line.keys() ^ own.keys() <= ({"seconds/reward"} if max_staleness else set())
        assert exports.keys() == weights.keys()
        for name, tensor in exports.items():
            assert torch.equal(tensor, weights[name]), name


def made(folder: Path, engine: str, max_staleness: int) -> MegarlConfig:
    config = small(folder)
    config.schedule.max_staleness = max_staleness
    config.rollout.engine = engine
    config.rollout.max_response_tokens = 24
    if engine == "transformers":
        # Fewer than there are to sample: requests wait in the controller until there is room.
        config.rollout.engine_args = {"max_model_len": 64, "max_num_seqs": 4}
    return config


def run(
    config: MegarlConfig, output: Path, order: random.Random | None = None
) -> tuple[list[list[PromptGroup]], list[dict[str, Any]], dict[str, torch.Tensor], list[list[Turn]]]:
    """Batches and metrics of each step, and the weights; answers come in this `order`, or as they are.

    Without one there is one engine, and each batch is sampled in one call, too, before the step.
    """
    config.output_dir = str(output)
    batches, lines, asked_at_once = list[list[PromptGroup]](), list[dict[str, Any]](), list[list[Turn]]()
    with open_job(RunSetup.read(config, "train")) as job:
        if order is not None:
            reorder(job.engines._queue, order)
        job.refit(0)
        take = job.rollouts.take

        def note(clock: Clock) -> Any:
            taken = take(clock)
            batches.append(taken.groups)
            return taken

        job.rollouts.take = note  # type: ignore[method-assign]
        clock = Clock()
        for _ in range(STEPS):
            if order is None:
                asked_at_once.append(ask_at_once(job))
            lines.append(train_step(job, clock))
        job.export()
    return batches, lines, exported(config), asked_at_once


def ask_at_once(job: Job) -> list[Turn]:
    """Samples of the prompts that are drawn next."""
    config = job.config
    draws = deepcopy(job.state.sampler).draw(config.loop.prompts_per_step)
    groups = [PromptGroup(job.data.prompts[index], ordinal) for ordinal, index in draws]
    stop_token_ids = tuple(job.model.stop_token_ids)
    sampling = sampling_parameters(config, stop_token_ids, [group.ordinal for group in groups])
    answers = job.engines.generate(requests_for(groups, sampling, with_baselines=False))
    return [turn for turns in answers for turn in turns]


def reorder(queue: RequestQueue, order: random.Random) -> None:
    """Let the controller receive answers when all engines have given theirs, in another order."""
    receive, held = queue.receive, list[tuple[Stream, RequestEnded]]()

    def hold(stream: Stream, events: Sequence[Event]) -> None:
        receive(stream, [each for each in events if not isinstance(each, RequestEnded)])
        held.extend((stream, each) for each in events if isinstance(each, RequestEnded))
        numbers = {each.number for _, each in held}
        if all(each.handle is None or each.number in numbers for each in list(queue._pending.values())):
            answers = held.copy()
            held.clear()
            order.shuffle(answers)
            for own, answer in answers:
                receive(own, [answer])

    queue.receive = hold  # type: ignore[method-assign,assignment]


def turns_of(groups: Sequence[PromptGroup]) -> list[Turn]:
    return [turn for group in groups for member in group.members for turn in member.turns]
