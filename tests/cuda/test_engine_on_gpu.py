"""A vLLM engine whose parameters are written by a Megatron rank of another process, while its CUDA graphs stay."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.managers import BaseManager

import pytest
import torch
from gpus import needs_gpus, needs_package
from launch import free_port

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from converters.topology import Topology
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports import MAPPED
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.vllm.engine import VllmEngine
from megatron_ext import device, parallel
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options import MegatronOptions
from megatron_ext.specs import module_names

pytestmark = [pytest.mark.cuda, needs_gpus(1), needs_package("vllm")]
LOOPBACK = "127.0.0.1"
ONE = ParallelSizes()
# Room for the trainer's rank on the same GPU.
ARGUMENTS = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "gpu_memory_utilization": 0.3}
GREEDY = SamplingParameters(temperature=0, max_tokens=32)
PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], [2, 11, 12, 30, 31, 3], [33] * 20]


class PolicyRank:
    """A trainer of one rank."""

    def __init__(self, folder, port):
        parallel.initialize(ONE, 0, f"tcp://{LOOPBACK}:{port}")
        architecture = read_architecture(read_json(folder / CONFIG))
        self._engine = MegatronModel(architecture, MegatronOptions(ONE, torch.bfloat16), 0)
        self.load(folder)

    def load(self, folder):
        self._engine.load_huggingface(HuggingFaceCheckpoint(folder))

    def form(self):
        return module_names(), device.backend()

    def open(self, spec):
        self._sender = Sender(0, spec.outgoing(0), self._engine.local_tensors(), LOOPBACK)
        return self._sender.address

    def connect(self, rendezvous):
        self._sender.connect(rendezvous)

    def send(self, version):
        return self._sender.send(version, with_checksum=True)


class Process(BaseManager):
    pass


Process.register("engine", VllmEngine)
Process.register("trainer", PolicyRank)


@contextmanager
def running_engine(folder, **arguments):
    """In a process of its own, which holds one engine."""
    with Process(ctx=get_context("spawn")) as process:
        engine = process.engine(folder, {**ARGUMENTS, **arguments})
        engine.start()
        yield engine
        engine.close()


def greedy(engine):
    return [
        generations[0].token_ids.tolist()
        for generations in engine.generate([Request(each, GREEDY) for each in PROMPTS])
    ]


def update(trainer, engine, names, version):
    engine.begin_update(version, names)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.send, version)
        engine.receive(version)
        assert sending.result(60) > 0
    engine.commit_update(version)


def write_and_compare(first, second, **arguments):
    with running_engine(second, **arguments) as engine:
        expected = greedy(engine)
    architecture = read_architecture(read_json(first / CONFIG))
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    with Process(ctx=get_context("spawn")) as process, running_engine(first, **arguments) as engine:
        trainer = process.trainer(second, free_port())
        before = greedy(engine)
        assert before != expected
        names, backend = trainer.form()
        traces = engine.trace_layout(architecture.hf_shapes, dtypes)
        topology = Topology.apart(1, len(traces))
        spec = TransferSpec(architecture, ONE, names, traces, 1, topology, bucket_bytes=2**16)
        spec.check(dtypes)
        listeners = [trainer.open(spec)]
        key, relay_listeners = secrets.token_bytes(16), engine.call_receivers(WeightReceiver.open, spec, 0)
        rendezvous = Rendezvous(MAPPED[backend], key, listeners, None, len(traces), 60.0, relay_listeners)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(trainer.connect, rendezvous)
            engine.call_receivers(WeightReceiver.connect, rendezvous)
            connecting.result(60)
        hf_names = list(architecture.hf_shapes)
        update(trainer, engine, hf_names, 1)
        assert greedy(engine) == expected
        trainer.load(first)
        update(trainer, engine, hf_names, 2)
        assert greedy(engine) == before


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_an_engine_answers_by_the_weights_that_were_written_into_it(name, tmp_path):
    write_and_compare(*(write_tiny_model(name, tmp_path / str(seed), seed=seed) for seed in (0, 1)))


@needs_gpus(2)
def test_workers_on_two_gpus_map_the_memory_of_one(tmp_path):
    folders = (write_tiny_model("qwen3_moe", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    write_and_compare(*folders, tensor_parallel_size=2)
