"""A vLLM engine whose parameters are written by a Megatron rank of another process, while its CUDA graphs stay."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.managers import BaseManager

import pytest
import torch
from gpus import needs_capability, needs_gpus, needs_package

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from converters.number_formats import FP8_BLOCK
from converters.topology import Topology
from megarl.process.ports import free_port
from megarl.quickstart.tiny_models import IN_BLOCKS, write_tiny_model
from megarl.resharding.direct.quantised_shard import Quantisation
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transfer_spec import TransferSpec, held_dtypes
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.transports.nixl_agent import is_installed
from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout import engine_kind
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.vllm.engine import VllmEngine
from megatron_ext import parallel
from megatron_ext.loopback import open_store
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions

pytestmark = [pytest.mark.cuda, needs_gpus(1), needs_package("vllm")]
LOOPBACK = "127.0.0.1"
ONE = ParallelSizes()
# Room for the trainer's rank on the same GPU.
ARGUMENTS = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "gpu_memory_utilization": 0.3}
GREEDY = SamplingParameters(temperature=0, max_tokens=32)
TIMEOUT_S = 60.0
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

    def module_names(self):
        return self._engine.module_names

    def store(self):
        self._store = open_store(LOOPBACK, timedelta(seconds=TIMEOUT_S))
        return LOOPBACK, self._store.port

    def open(self, spec):
        self._sender = Sender(0, spec.outgoing(0), self._engine.local_tensors(), LOOPBACK)
        return self._sender.address

    def connect(self, rendezvous):
        self._sender.connect(rendezvous)

    def send(self, version):
        return self._sender.send(version)


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
        assert sending.result(60).size_bytes > 0
    engine.commit_update(version)


def spec_of(architecture, trainer, engine, number_format):
    shapes, dtypes = architecture.hf_shapes, architecture.hf_dtypes(torch.bfloat16)
    quantisation = Quantisation(number_format, torch.bfloat16) if number_format else None
    if number_format:
        shapes = number_format.checkpoint(architecture)[0]
    traces = [
        trace.unpacked() for trace in engine.trace_layout(shapes, held_dtypes(architecture, dtypes, quantisation))
    ]
    topology = Topology.apart(1, len(traces))
    spec = TransferSpec(architecture, ONE, trainer.module_names(), traces, 1, topology, 2**16, quantisation)
    spec.check(dtypes)
    return spec


def connect(trainer, engine, spec, transport):
    store = trainer.store() if TRANSPORTS[transport].needs_store else None
    listeners = [trainer.open(spec)]
    key, relay_listeners = secrets.token_bytes(16), engine.call_receivers(WeightReceiver.open, spec, 0)
    rendezvous = Rendezvous(transport, key, listeners, store, len(spec.traces), TIMEOUT_S, relay_listeners)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(trainer.connect, rendezvous)
        engine.call_receivers(WeightReceiver.connect, rendezvous)
        connecting.result(TIMEOUT_S)


def write_and_compare(first, second, transport="cuda_ipc", number_format=None, **arguments):
    architecture = read_architecture(read_json(first / CONFIG))
    if number_format:
        arguments = engine_kind("vllm").quantised(arguments, number_format, architecture)
    with running_engine(second, **arguments) as engine:
        expected = greedy(engine)
    with Process(ctx=get_context("spawn")) as process, running_engine(first, **arguments) as engine:
        trainer = process.trainer(second, free_port())
        before = greedy(engine)
        assert before != expected
        connect(trainer, engine, spec_of(architecture, trainer, engine, number_format), transport)
        hf_names = list(architecture.hf_shapes)
        update(trainer, engine, hf_names, 1)
        assert greedy(engine) == expected
        trainer.load(first)
        update(trainer, engine, hf_names, 2)
        assert greedy(engine) == before


WITHOUT_NIXL = pytest.mark.skipif(not is_installed(), reason="needs NIXL, which is not installed: `make setup CUDA=1`")
# From and to a GPU's memory; gloo's bytes go by way of pinned memory of the host.
TRANSPORTS_OF_GPUS = ["cuda_ipc", pytest.param("rdma", marks=WITHOUT_NIXL), "tcp"]


@pytest.fixture
def two_models(tmp_path):
    """Makes two models of a family, with weights of their own."""
    return lambda name, fields=None: [
        write_tiny_model(name, tmp_path / str(seed), seed=seed, fields=fields) for seed in (0, 1)
    ]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_an_engine_answers_by_the_weights_that_were_written_into_it(name, two_models):
    write_and_compare(*two_models(name))


@pytest.mark.parametrize("transport", TRANSPORTS_OF_GPUS)
def test_weights_go_by_every_transport(transport, two_models):
    write_and_compare(*two_models("qwen3_moe"), transport)


@needs_capability(8, 9)
@pytest.mark.parametrize("transport", TRANSPORTS_OF_GPUS)
def test_codes_and_scales_of_fp8_go_by_every_transport(transport, two_models):
    # vLLM's own choice, DeepGEMM, rounds scales to powers of two.
    kernels = {"linear_backend": "triton", "moe_backend": "triton"}
    write_and_compare(*two_models("qwen3_moe", IN_BLOCKS["qwen3_moe"]), transport, FP8_BLOCK, **kernels)


@needs_gpus(2)
@pytest.mark.parametrize("transport", TRANSPORTS_OF_GPUS)
def test_workers_on_two_gpus_get_the_weights_of_one(transport, two_models):
    write_and_compare(*two_models("qwen3_moe"), transport, tensor_parallel_size=2)
