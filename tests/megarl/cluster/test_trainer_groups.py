"""Several groups of Megatron ranks side by side: a policy that is trained, a critic, and a frozen reward model."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import ray
import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import AutoModelForSequenceClassification

from converters.architectures import read_architecture
from converters.cost.compute import forward_flops
from converters.errors import UserError
from converters.formats.safetensors import read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.algorithms.value_loss import ValueObjective
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import trainer_role
from megarl.cluster.ray.runtime import ray_cluster
from megarl.cluster.trainer import trainer_group
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.cuts import share_of
from megarl.cluster.trainer.rank_methods import TrainerWorker
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers import calls
from megarl.cluster.workers.worker import WorkerGone
from megarl.data import stretches
from megarl.data.stretches import StoredArray, fetch_concatenated
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.throughput import Throughput
from megarl.schema import ClusterConfig
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

DP2 = ParallelSizes(world_size=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(ClusterConfig()):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def classifier(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of one label, with the backbone of the language model."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("classifier")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).save_pretrained(folder)
    return folder


def batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([7, 2, 11, 1, 5])
    total = int(lengths.sum())
    fields = {"weights": torch.ones(total), "returns": torch.full((total,), 3.0)}
    return Batch.of(RaggedBatch(torch.randint(4, 50, (total,), generator=generator), lengths, fields))


def group(stack: ExitStack, name: str, logs: Path, sizes: ParallelSizes, **cluster: float) -> TrainerGroup:
    options, config = MegatronOptions(sizes, torch.float32, optimizer={"lr": 1e-3}), ClusterConfig(**cluster)
    seats = stack.enter_context(reserve([trainer_role(name, sizes, config)], config))
    started = stack.enter_context(TrainerGroup(options, config, seats[name], logs, max_tokens=12))
    started.start()
    return started


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_several_groups_work_at_the_same_time(model: Path, classifier: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        policy = group(stack, "trainer", tmp_path, ParallelSizes())
        critic = group(stack, "critic", tmp_path, DP2)
        policy.build(model, None, 3, reference=True)
        critic.build(model, None, 2, reference=False, head="value")
        predictions_are_in_the_order_of_the_batch(critic, policy, classifier)
        a_rank_returns_a_result_only_if_it_is_to(policy)
        what_is_stored_is_computed_with_as_what_is_sent(policy)
        the_critic_learns(critic, model)
        the_reference_becomes_the_policy(policy)
        work_is_counted(policy, model)
        a_rank_may_write_for_longer_than_a_collective_waits(critic, tmp_path / "checkpoint")
    assert {path.name for path in tmp_path.glob("*.log")} == {"trainer_0.log", "critic_0.log", "critic_1.log"}


def predictions_are_in_the_order_of_the_batch(critic: TrainerGroup, policy: TrainerGroup, classifier: Path) -> None:
    """First as a frozen reward model: the scores are those of transformers, the values end before them."""
    critic.build_frozen(classifier, head="value")
    whole = batch()
    reference = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    sequences = whole.load().tokens.split(whole.lengths.tolist())
    with torch.no_grad():
        of_tokens = [reference.score(reference.model(each[None]).last_hidden_state)[0, :, 0] for each in sequences]
    scores, values = critic.scores(whole), fetch_tensor(critic.values(whole))
    torch.testing.assert_close(scores, torch.stack([each[-1] for each in of_tokens]), atol=1e-5, rtol=0)
    shifted = torch.cat([torch.cat([torch.zeros(1), each[:-1]]) for each in of_tokens])
    torch.testing.assert_close(values, shifted, atol=1e-5, rtol=0)
    # One sequence for two ranks: the other has none.
    alone = fetch_tensor(critic.values(Batch.of(whole.load().select([2]))))
    torch.testing.assert_close(alone, shifted.split(whole.lengths.tolist())[2], atol=1e-5, rtol=0)
    squares = fetch_tensor(policy.predictions(whole, ["probability_squares"], temperature=1.0)["probability_squares"])
    assert squares.shape == (whole.total_tokens,)
    assert (squares[1:7] > 0).all()


def a_rank_returns_a_result_only_if_it_is_to(policy: TrainerGroup) -> None:
    share = share_of(batch(), [[4, 0], [2]])
    returned, other = (
        policy.call(TrainerWorker.predictions, *share, returns_result, ["greedy"], 1.0)
        for returns_result in (True, False)
    )
    assert [list(each) for each in returned] == [["greedy"]]
    assert other == [None]


def what_is_stored_is_computed_with_as_what_is_sent(policy: TrainerGroup) -> None:
    sent = batch()
    parts = [fetch_concatenated([values]) for values in sent.tokens]
    away = replace(
        sent, tokens=[(StoredArray(ray.put(part), part.dtype.str, len(part), is_finite=True),) for part in parts]
    )
    with patch.object(stretches, "_STORED_BYTES", 1):
        placed = policy.place(sent)
    assert {type(stretch) for values in placed.tokens for stretch in values} == {StoredArray}
    assert len({stretch.reference for values in placed.tokens for stretch in values}) == 1
    assert torch.equal(fetch_tensor(placed.tokens), fetch_tensor(sent.tokens))
    expected, *found = (fetch_tensor(policy.log_probs(each, temperature=1.0)) for each in (sent, away, placed))
    assert all(torch.equal(each, expected) for each in found)
    assert expected.count_nonzero() == sent.total_tokens - len(sent)


def work_is_counted(policy: TrainerGroup, model: Path) -> None:
    whole, (per_token, per_square) = batch(), forward_flops(read_architecture(read_json(model / "config.json")))
    forward = per_token * whole.total_tokens + per_square * int((whole.lengths**2).sum())
    policy.take_flops()
    policy.log_probs(whole, temperature=1.0)
    assert policy.take_flops() == pytest.approx(forward)
    policy.predictions(whole, ["greedy", "reference_log_probs"], temperature=1.0)
    assert policy.take_flops() == pytest.approx(2 * forward)
    policy.train_step(whole, SftObjective())
    timings = {"throughput/tokens_per_s": 6.0, "seconds/update": 2.0, "seconds/rollout": 4.0, "seconds/step": 8.0}
    of_run = Throughput(policy, ("log_probs", "update"), gpus=3, peak_tflops=1e-9, waiting=("rollout", "reward"))
    found = of_run.end_step(timings)
    assert found == timings | {
        "throughput/trainer_idle": 0.5,
        "throughput/tokens_per_s_per_gpu": 2.0,
        "throughput/trainer_tflops": pytest.approx(3 * forward / 2.0 / 1e12),
        "throughput/mfu": pytest.approx(3 * forward / 2.0 / 1e3),
    }
    assert policy.device_name() == "cpu"


def the_critic_learns(critic: TrainerGroup, model: Path) -> None:
    critic.build(model, None, 2, reference=False, head="value")
    assert not fetch_tensor(critic.values(batch())).any()
    steps = [critic.train_step(batch(), ValueObjective(value_clip=None)) for _ in range(2)]
    # A rank has two micro-batches, and tells of both together.
    assert [len(step.metrics) for step in steps] == [2, 2]
    first, second = (sum(float(each.sums["value/loss"]) for each in step.metrics) for step in steps)
    assert second < first
    assert fetch_tensor(critic.values(batch())).any()


def the_reference_becomes_the_policy(policy: TrainerGroup) -> None:
    def log_probs(*, reference: bool) -> Tensor:
        return fetch_tensor(policy.log_probs(batch(), temperature=1.0, reference=reference))

    before = log_probs(reference=True)
    policy.train_step(batch(), SftObjective())
    present = log_probs(reference=False)
    assert not torch.equal(present, before)
    both = policy.predictions(batch(), ["reference_log_probs", "log_probs"], temperature=1.0)
    assert torch.equal(fetch_tensor(both["reference_log_probs"]), before)
    assert torch.equal(fetch_tensor(both["log_probs"]), present)
    policy.refresh_reference()
    assert torch.equal(log_probs(reference=True), present)


class Disk:
    """Whoever reads it, a rank that is to do nothing, has a disk that is slow, and collectives that wait for 4 s."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Callable[[float], list[object]], tuple[float]]:
        return write_late, (self.seconds,)


def write_late(seconds: float) -> list[object]:
    from megatron_ext.checkpoint.checkpoint_writer import _Writer

    write = _Writer.write
    _Writer.write = lambda writer: (time.sleep(seconds), write(writer))
    distributed_c10d._set_pg_timeout(timedelta(seconds=4), torch.distributed.group.WORLD)
    return []


def a_rank_may_write_for_longer_than_a_collective_waits(ranks: TrainerGroup, folder: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    calls.wait(ranks.begin_each(TrainerWorker.reload, [(Disk(0),), (Disk(7),)]))
    folder.mkdir()
    ranks.begin_save(folder, in_background=True)
    assert ranks.finish_save() >= 7
    assert (folder / ".metadata").exists()


class EndlessShare:
    """A share of a batch, of which the rank that reads it sees no end."""

    def load(self) -> None:
        time.sleep(3600)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_rank_that_stands_still_is_the_one_that_is_told(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(calls, "_CONSEQUENCES_S", 1.0)
    shares = iter([batch(), EndlessShare()])
    monkeypatch.setattr(trainer_group, "share_of", lambda *arguments: (next(shares), share_of(*arguments)[1]))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    says = (
        r"^trainer_1 did not come to a collective in which trainer_0 waited \(RuntimeError: .*Timed out waiting 40000ms"
        r" .*\): the end of its log .* continues from the last checkpoint\n"
    )
    with pytest.raises(WorkerGone, match=says), ExitStack() as stack:
        train(group(stack, "trainer", tmp_path, DP2, collective_timeout_s=40), model)


def train(ranks: TrainerGroup, model: Path) -> None:
    ranks.build(model, None, 1, reference=False)
    ranks.train_step(batch(), SftObjective())


@pytest.mark.usefixtures("cluster")
def test_what_is_wrong_with_an_auxiliary_models_folder_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with ExitStack() as stack:
        frozen = group(stack, "teacher_math", tmp_path, ParallelSizes())
        with pytest.raises(UserError, match=str(tmp_path)):
            frozen.build_frozen(tmp_path)
