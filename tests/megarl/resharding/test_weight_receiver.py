"""The receiver of an engine's worker knows nothing of the engine but its two hooks."""

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_configs import make_config
from transfer_scenes import LOOPBACK, Scene, shard_of

from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.traced_layout import LoadTrace
from converters.topology import Topology
from megarl.resharding.direct.connections import Failure, TransferError
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.weight_receiver import WeightReceiver, outcome, results

SCENE = Scene(make_config("qwen3"), ParallelSizes(world_size=1), workers=1, dtype=torch.float32)


class Model:
    """A model of any engine: it keeps what it derives, here the number of values, beside the parameters."""

    def __init__(self):
        self.parameters = shard_of(SCENE.plan.destination, 0, 0)
        self.sum = None

    def loaded_parameters(self):
        return self.parameters

    def after_direct_write(self):
        self.sum = sum(each.double().sum().item() for each in self.parameters.values())


@pytest.fixture
def spec():
    trace = LoadTrace(SCENE.plan.destination.shard(0), SCENE.dtypes[0], [], {})
    topology = Topology.apart(1, 1)
    return TransferSpec(SCENE.architecture, SCENE.source, "local", [trace], 1, topology, bucket_bytes=2**16)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def receiver(model):
    receiver = WeightReceiver(model, 0)
    yield receiver
    receiver.close()


@pytest.fixture
def sender(spec, receiver):
    """The other side, connected; it has version 1."""
    sender = Sender(0, spec.outgoing(0), shard_of(SCENE.plan.source, 0, 1), LOOPBACK)
    relay = receiver.open(spec, 0)
    rendezvous = Rendezvous("shared_memory", secrets.token_bytes(16), [sender.address], None, 1, 20.0, [relay])
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(sender.connect, rendezvous)
        receiver.connect(rendezvous)
        connecting.result(60)
        # With its own address, as a trainer's rank is called.
        sender.begin = lambda version: pool.submit(sender.send, version)
        yield sender
        sender.close()


def test_what_is_derived_from_weights_follows_every_write(model, receiver, sender):
    expected = shard_of(SCENE.plan.destination, 0, 1)
    sending = sender.begin(1)
    assert receiver.compare(1) == set(expected)
    sending.result(60)
    assert model.sum is None
    sending = sender.begin(2)
    receiver.receive(2)
    sending.result(60)
    assert all(torch.equal(model.parameters[name], tensor) for name, tensor in expected.items())
    assert model.sum == pytest.approx(sum(each.double().sum().item() for each in expected.values()))


def test_after_a_failure_it_is_opened_anew(spec, model, receiver, sender):
    sending = sender.begin(3)
    with pytest.raises(TransferError, match="of version 3, and version 4 lacks"):
        receiver.receive(4)
    with pytest.raises(TransferError):
        sending.result(60)
    assert model.sum is None
    with pytest.raises(TransferError, match="is not connected for a transfer"):
        receiver.receive(3)
    assert receiver.open(spec, 0)


def test_why_a_worker_failed_gets_past_an_engine_that_lets_no_exception_through(receiver):
    failed = outcome(WeightReceiver.compare, receiver, 1)
    assert failed == Failure("the engine is not connected for a transfer")
    assert results([{"a"}, set()]) == [{"a"}, set()]
    with pytest.raises(TransferError, match=r"^the engine is not connected for a transfer$"):
        results([{"a"}, failed])
