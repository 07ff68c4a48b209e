"""Refits of a whole job: which path they take, and what becomes of the run when something fails in the middle."""

import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import breaking_points
import dying_engine
import pytest
import ray
import torch
from breaking_points import break_at
from dying_engine import die_after_steps
from planned_bytes import check_moved, planned_refit

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from converters.number_formats import FP8_BLOCK
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import WorkerFailed
from megarl.config.compose import compose
from megarl.planning.cluster import Cluster, Cores
from megarl.planning.refit import engine_sizes
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import IN_BLOCKS, write_tiny_model
from megarl.refit.choice import loader_path
from megarl.refit.log_prob_check import LogProbMismatchError
from megarl.refit.refit import Refit
from megarl.resharding.direct.transfer_spec import check_traces
from megarl.rollout.protocol import Engine, Request, SamplingParameters
from megarl.run.job import open_job
from megarl.run.opening import RunSetup
from megarl.run.rollouts import Rollouts
from megarl.run.schedule import Schedule
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")


@pytest.fixture
def open_run(tmp_path):
    def make(*overrides, fields=None):
        model = write_tiny_model("qwen3", tmp_path / "model", fields=fields)
        files = write_arithmetic(tmp_path / "data", held_out=16)
        config = compose(
            "quickstart",
            [
                f"output_dir={tmp_path / 'run'}",
                f"model.path={model}",
                f"data.train_files=[{files.train}]",
                f"data.eval_files=[{files.eval}]",
                "megatron.expert_model_parallel_size=1",
                "megatron.lr=1e-2",
                "loop.prompts_per_step=4",
                "loop.samples_per_prompt=2",
                f"reward.function={Path(__file__).parents[1] / 'digits.py'}:count_digits",
                "refit.bucket_bytes=600000",
                "tracking.loggers=[]",
                *overrides,
            ],
        )
        return open_job(RunSetup.read(config, "train"))

    return make


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "fields"),
    # Both workers have the one head of keys and values, in whole blocks.
    [(1, {}), (2, {"num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 128})],
)
def test_a_run_whose_engine_is_in_fp8(open_run, workers, fields):
    overrides = ("rollout.weights=fp8_block", "refit.delta=true", "megatron.lr=1e-4")
    cut = f"rollout.engine_args.tensor_parallel_size={workers}"
    with open_run(*overrides, cut, fields={**IN_BLOCKS["qwen3"], **fields}) as job:
        assert job.refit(0)["refit/direct"] == 0
        # Compared byte by byte with what the engine's loader made of it.
        assert job.refit.description == "direct, through shared_memory"
        planned = planned_in_fp8(job, workers).traffic(torch.float32)
        # Compared with what was sent to be compared with.
        metrics = train_step(job, Clock())
        assert metrics["refit/direct"] == 1
        assert metrics["refit/bytes"] < 0.9 * planned.direct.sum()
        assert 0 < metrics["refit/changed"] < 1
        job.refit._path.connect()
        metrics = train_step(job, Clock())
        assert "refit/changed" not in metrics
        check_moved(planned, metrics["refit/bytes"])
        assert metrics["refit/bytes"] < 0.6 * sum(each.numel() * 4 for each in weights_of(job))
        assert 1e-4 < metrics["log_prob_difference/mean"] < 0.1
        assert 1e-4 < train_step(job, Clock())["log_prob_difference/mean"] < 0.1


def planned_in_fp8(job, workers):
    """The refit that `megarl plan` would plan, on one machine without GPUs."""
    sizes = job.trainer.parallel
    cluster = Cluster(gpus_per_node=sizes.world_size + workers, cores=Cores(2, 1.0, 1.0))
    engine = engine_sizes(workers, None)
    return planned_refit(job.model.architecture, sizes, engine, number_format=FP8_BLOCK, cluster=cluster)


def weights_of(job):
    return [torch.empty(shape, device="meta") for shape in job.model.architecture.hf_shapes.values()]


def run_in(group, worker, function, *arguments):
    """Run a function in the process of a worker, whose program does not know."""
    for module in (breaking_points, dying_engine, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    ray.get(group.workers[worker].actor.__ray_call__.remote(lambda _: function(*arguments)))


def test_a_failed_transfer_is_repeated_an_engine_that_dies_comes_back_and_a_dead_rank_ends_the_run(open_run, capsys):
    with pytest.raises(WorkerFailed, match=r"^the process of trainer_1 died: .*\n.*trainer_1\.log"):
        repeat_and_lose_a_rank(open_run, capsys)


def repeat_and_lose_a_rank(open_run, capsys):
    with open_run("rollout.engine=transformers", "megatron.context_parallel_size=2", "refit.delta=true") as job:
        job.refit(0)
        assert job.refit.description == "direct, through shared_memory"
        # The first transfer of a connection is of whole messages, and one that came wrong fails it.
        job.refit._path.connect()
        run_in(job.trainer, 1, break_at, "packed", 1, "corrupt")
        metrics = train_step(job, Clock())
        assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 1)
        assert "refit/changed" not in metrics
        # The next tokens are sampled with the second attempt.
        metrics = train_step(job, Clock())
        assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 0)
        assert 0 < metrics["refit/changed"] <= 1
        assert metrics["log_prob_difference/max"] < 1e-4
        check_the_route(job)
        check_that_the_last_engine_killed_in_a_rollout_changes_no_token(job, capsys)
        run_in(job.trainer, 1, break_at, "packed", 1, "kill")
        # Heard of, and not given up: refit.timeout_s is longer than a test may take.
        job.refit(job.state.step + 1)


@pytest.mark.long
def test_what_is_not_to_be_verified_is_taken_as_it_comes(open_run):
    with open_run("rollout.engine=transformers", "megatron.context_parallel_size=2", "refit.verify=off") as job:
        job.refit(0)
        run_in(job.trainer, 1, break_at, "packed", 1, "corrupt")
        metrics = train_step(job, Clock())
        assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 0)
        assert "refit/log_prob_difference" not in metrics


def check_that_the_last_engine_killed_in_a_rollout_changes_no_token(job, capsys):
    position = job.state.sampler.state_dict()
    undisturbed = sampled_numbers(job)
    job.state.sampler.load_state_dict(position)
    run_in(job.engines.processes, 0, die_after_steps, 10)
    # The rollout waits for the new engine, which gets the weights of this step.
    continued = sampled_numbers(job)
    for found, expected in zip(continued, undisturbed, strict=True):
        # The new engine computes the keys and values of the tokens that were told of at once: sums in another order.
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert found == expected._replace(log_probs=found.log_probs)
    metrics = train_step(job, Clock())
    assert (metrics["refit/direct"], metrics["refit/repeated"], metrics["engines/restarts"]) == (1, 0, 1)
    assert metrics["engines/seconds_down"] > 0
    # All prompts have eight tokens, and what was sampled behind them was told of in time.
    found = re.search(r"had not answered (\d) requests: they go on behind the (\d+) tokens", capsys.readouterr().err)
    requests, tokens = map(int, found.groups())
    assert tokens > 0
    assert metrics["engines/tokens_moved"] == 8 * requests + tokens
    # With the weights of the ranks, sent to it alone before and now with those of the next step.
    assert metrics["log_prob_difference/max"] < 1e-4
    assert train_step(job, Clock())["log_prob_difference/max"] < 1e-4


@pytest.mark.long
def test_an_engine_that_hangs_when_everything_came_is_restarted_and_the_refit_repeated(open_run, capsys):
    with open_run("rollout.engine=transformers", "refit.timeout_s=30") as job:
        job.refit(0)
        assert job.refit.description.startswith("direct")
        run_in(job.engines.processes, 0, hang_when_written)
        assert job.refit(1)["refit/repeated"] == 1
        assert job.engines.end_step()["engines/restarts"] == 1
    assert "engine_0 gave no answer for 30 s; engine_0 is started again" in capsys.readouterr().err


def hang_when_written():
    from megarl.rollout.transformers.weights import ModelWeights

    ModelWeights.after_direct_write = lambda _: time.sleep(3600)


class Sampled(NamedTuple):
    """All that one trajectory gives to training, by value."""

    ordinal: int
    reward: float
    token_ids: list[list[int]]
    versions: list[list[int]]
    log_probs: list[float]


def sampled_numbers(job) -> list[Sampled]:
    schedule = Schedule(job.config.loop.prompts_per_step, version=job.state.step)
    groups = (
        Rollouts(job.config, job.data.prompts, job.state.sampler, schedule, job.rollouts._workers).take(Clock()).groups
    )
    return [
        Sampled(
            ordinal=group.ordinal,
            reward=each.reward,
            token_ids=[turn.token_ids.tolist() for turn in each.turns],
            versions=[turn.versions.tolist() for turn in each.turns],
            log_probs=[log_prob for turn in each.turns for log_prob in turn.log_probs.tolist()],
        )
        for group in groups
        for each in group.trajectories
    ]


def check_the_route(job):
    """Engines that are not of this policy are refused before anything moves."""
    spec = job.refit._path._spec
    dtypes = job.trainer.weights.dtypes()
    spec.check(dtypes)
    narrow = [replace(each, dtypes=dict.fromkeys(each.dtypes, torch.bfloat16)) for each in spec.traces]
    # The traced part is enough: the rest may go through the loader.
    partial = [replace(each, shard=replace(each.shard, placements=each.shard.placements[:1])) for each in narrow]
    with pytest.raises(UserError, match=r"keeps model.* as bfloat16 and the policy is trained in float32: set rollout"):
        check_traces(partial, dtypes)
    with pytest.raises(UserError, match="as bfloat16"):
        replace(spec, traces=narrow).check(dtypes)
    other = read_architecture({**read_json(job.model.folder / CONFIG), "vocab_size": 80})
    with pytest.raises(UserError, match="embed_tokens"):
        replace(spec, architecture=other).check(dtypes)
    # Through the loader nothing could check it later, so that it is asked first.
    message = r"^the engine is of another model than the policy, .* refuses it: .*embed_tokens"
    with pytest.raises(UserError, match=message):
        loader_path(job.trainer, job.engines, other, replace(job.config.refit, path="loader"))


@pytest.mark.long
def test_tokens_tell_what_no_checksum_saw_and_engines_that_die_again_end_the_run(open_run):
    says = r"=1 allows, the last time: the process of engine_1 died: the first time, the process of engine_0 died"
    with pytest.raises(WorkerFailed, match=rf"^engines died more .*{says}.*\n.*engine_0\.log"):
        probe_and_lose_the_engines(open_run)


def probe_and_lose_the_engines(open_run):
    with open_run(
        "refit.verify=logprobs", "refit.transport=tcp", "rollout.replicas=2", "cluster.max_engine_restarts=1"
    ) as job:
        assert job.refit(0)["refit/log_prob_difference"] < 1e-4
        assert job.refit.description == "direct, through tcp"
        assert job.refit(1)["refit/log_prob_difference"] < 1e-4
        check_that_each_engine_is_asked(job)
        check_that_one_engine_is_written_while_the_other_serves(job)
        run_in(job.trainer, 0, break_at, "packed", 1, "garble")
        with pytest.raises(LogProbMismatchError, match=r"differ by .* nats .* refit\.log_prob_tolerance is 0\.05"):
            job.refit(5)
        check_that_an_engine_that_permutes_its_weights_goes_on_through_its_loader(job)
        check_that_a_refit_and_a_rollout_go_on_without_an_engine_that_dies(job)
        run_in(job.engines.processes, 1, die_after_steps, 3)
        sampled_numbers(job)


def check_that_a_refit_and_a_rollout_go_on_without_an_engine_that_dies(job):
    job.refit._path.close()
    # Before it has met any rank: to all others it is one that is late, and refit.timeout_s is longer than a test.
    run_in(job.engines.processes, 0, break_at, "came", 1, "kill")
    metrics = job.refit(10)
    assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 1)
    assert metrics["refit/log_prob_difference"] < 1e-4
    assert [(each.state, each.version) for each in job.engines.handles] == [("restarting", -1), ("serving", 10)]
    assert {sample.versions[0][0] for sample in sampled_numbers(job)} == {10}


def refit_of(job, engines, path):
    config, architecture = replace(job.config.refit, path=path), job.model.architecture
    first = loader_path(job.trainer, engines, architecture, config)
    return Refit(job.trainer, engines, first, list(architecture.hf_shapes), timeout_s=config.timeout_s)


def check_that_each_engine_is_asked(job):
    """Also one that is full, to which no request would go."""
    busy = job.engines.handles[1]
    busy.load += 1000
    assert busy.is_full
    job.refit._check(job.trainer, job.engines, job.gpus)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    wait([busy.begin(Engine.call_receivers, scale, 2.0)])
    with pytest.raises(LogProbMismatchError):
        job.refit._check(job.trainer, job.engines, job.gpus)
    wait([busy.begin(Engine.call_receivers, scale, 0.5)])
    job.refit._check(job.trainer, job.engines, job.gpus)
    busy.load -= 1000


def scale(receiver, factor):
    """Multiply the weights that it receives, which a power of two can undo."""
    for parameter in receiver._model.loaded_parameters().values():
        parameter.data.mul_(factor)


def check_that_one_engine_is_written_while_the_other_serves(job):
    greedy = SamplingParameters(temperature=0, max_tokens=8)
    requests = [Request(list(prompt.token_ids), greedy) for prompt in job.data.eval_prompts[:4]]
    before = job.engines.generate(requests)
    alone = refit_of(job, job.engines.only(1), "auto")
    assert [alone(version)["refit/direct"] for version in (2, 3)] == [0, 1]
    assert [handle.version for handle in job.engines.handles] == [1, 3]
    after = job.engines.generate(requests)
    assert [turn.versions[0] for (turn,) in after] == [1, 3] * (len(requests) // 2)
    # The trainer's weights are the same.
    assert [turn.token_ids.tolist() for (turn,) in after] == [turn.token_ids.tolist() for (turn,) in before]
    # The ranks had met that engine only, so that the one which waits for its weights is heard of, and all meet again.
    metrics = job.refit(4)
    assert (metrics["refit/direct"], metrics["refit/repeated"]) == (1, 1)
    assert [handle.version for handle in job.engines.handles] == [4, 4]


def check_that_an_engine_that_permutes_its_weights_goes_on_through_its_loader(job):
    run_in(job.engines.processes, 0, permute_after_loading)

    make_refit = partial(refit_of, job, job.engines)

    refit = make_refit("auto")
    assert refit(6)["refit/direct"] == 0
    reason = "the engine does not keep model.layers.1.mlp.down_proj.weight as it was loaded"
    assert refit.description == f"loader ({reason})"
    assert refit(7)["refit/direct"] == 0
    with pytest.raises(UserError, match=f"refit.path=direct is not possible: {reason}"):
        make_refit("direct")(8)
    through_loader = make_refit("loader")
    assert through_loader(9)["refit/direct"] == 0
    assert through_loader.description == "loader (refit.path=loader)"


def permute_after_loading():
    """As some kernels do: they read a weight in an order of their own."""
    from megarl.rollout.vllm.weight_transfer import SharedMemoryTransfer

    finish = SharedMemoryTransfer.finish_weight_update

    def finish_and_permute(self):
        finish(self)
        weight = self.model.get_parameter("model.layers.1.mlp.down_proj.weight")
        weight.data.copy_(weight.data.flip(0))

    SharedMemoryTransfer.finish_weight_update = finish_and_permute
