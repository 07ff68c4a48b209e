"""Engines that sample ahead on the trainer's own devices: what they are cut off from goes on under the new weights."""

import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_colocation import DEVICE_BYTES, SHARED, STEPS, copy_checkpoint, small
from transformers import AutoModelForCausalLM

from megarl.data import PromptGroup, Turn
from megarl.data.stretches import fetch
from megarl.output.places import EXPORT
from megarl.run.job import open_job
from megarl.run.opening import RunSetup
from megarl.run.rollouts import RolloutBatch
from megarl.schema import MegarlConfig
from megarl.tracking import MetricValue
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")

# Enough that the engine has seconds to do for the next batch when one is complete, on a machine that is busy, too.
PROMPTS = 12
DEATHS = 2


class Step(NamedTuple):
    """A step: what was trained on with the weights of `version`, and its metrics."""

    version: int
    groups: list[PromptGroup]
    metrics: Mapping[str, MetricValue]

    @property
    def turns(self) -> list[Turn]:
        return [turn for group in self.groups for member in group.members for turn in member.turns]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_in_flight_goes_on_under_new_weights_and_nothing_is_lost_or_trained_on_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ahead(tmp_path)
    versions = tmp_path / "versions"
    shutil.copytree(config.model.path, versions / "0")
    run = steps(config, versions, monkeypatch)
    check(run, range(STEPS), versions)
    assert any(len(set(fetch(turn.versions).tolist())) == 2 for step in run for turn in step.turns)
    assert sum(step.metrics["engines/tokens_moved"] for step in run) > 0
    # From a checkpoint, in which finished groups are and what there was of others, which goes on.
    again = tmp_path / "again"
    for version in ("0", "1"):
        shutil.copytree(versions / version, again / version)
    config.output_dir = str(tmp_path / "resumed")
    copy_checkpoint(tmp_path / "run", tmp_path / "resumed", step=1)
    resumed = steps(config, again, monkeypatch)
    check(resumed, range(1, STEPS), again)
    assert any(set(fetch(turn.versions).tolist()) == {0, 1} for turn in resumed[0].turns)
    assert {step.metrics["engines/restarts"] for step in resumed} == {DEATHS}


def ahead(folder: Path) -> MegarlConfig:
    config = small(folder)
    config.loop.prompts_per_step = PROMPTS
    config.schedule.max_staleness, config.schedule.in_flight = 1, "recompute"
    config.cluster.pools, config.cluster.device_memory_bytes = {"all": SHARED}, DEVICE_BYTES
    # Lengths differ: an untrained model ends a response with any token.
    config.rollout.max_response_tokens, config.rollout.engine_args["max_model_len"] = 160, 176
    # Few at once: the engine has a while to do for the next batch when one is complete.
    config.rollout.engine_args["max_num_seqs"] = 2
    return config


def steps(config: MegarlConfig, versions: Path, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """All steps to the last; the weights of each version are left in a folder of its number."""
    found = list[Step]()
    with open_job(RunSetup.read(config, "train")) as job:
        taken, take = list[RolloutBatch](), job.rollouts.take

        def note(clock: Clock) -> RolloutBatch:
            taken.append(take(clock))
            return taken[-1]

        monkeypatch.setattr(job.rollouts, "take", note)
        if job.state.step == 0:
            # As if engines had died.
            job.engines.load_state_dict({"count": DEATHS, "first": None})
        job.refit(job.state.step)
        clock = Clock()
        while job.state.step < STEPS:
            metrics = train_step(job, clock)
            found.append(Step(job.state.step - 1, taken[-1].groups, metrics))
            job.save()
            job.export()
            shutil.copytree(Path(config.output_dir, EXPORT), versions / str(job.state.step))
    return found


def check(run: Sequence[Step], expected: range, folder: Path, *, prompts: int = PROMPTS, staleness: int = 1) -> None:
    """Check that each draw is trained on in its order, no older than allowed, with the log-probs of its versions."""
    assert [step.version for step in run] == list(expected)
    ordinals = [group.ordinal for step in run for group in step.groups]
    assert ordinals == list(range(expected.start * prompts, expected.stop * prompts))
    for step in run:
        assert step.metrics["staleness/max"] <= staleness
        assert max(value for name, value in step.metrics.items() if name.startswith("memory/")) < DEVICE_BYTES
        for turn in step.turns:
            assert turn.finish_reason in ("stop", "length")
            check_turn(turn, range(step.version - staleness, step.version + 1), folder)


def check_turn(turn: Turn, allowed: range, folder: Path) -> None:
    versions = torch.tensor(fetch(turn.versions))
    assert torch.equal(versions, versions.sort().values)
    assert set(versions.tolist()) <= set(allowed)
    token_ids = [*fetch(turn.prompt_ids).tolist(), *fetch(turn.token_ids).tolist()]
    for each in set(versions.tolist()):
        own = versions == each
        expected = log_probs(folder / str(each), token_ids)[-len(versions) :]
        torch.testing.assert_close(torch.tensor(fetch(turn.log_probs))[own], expected[own], atol=1e-5, rtol=0)


@torch.no_grad()
def log_probs(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probs of all tokens but the first, of HuggingFace's model in a folder."""
    tokens = torch.tensor([list(token_ids)])
    return model(folder)(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


@cache
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
