"""Bytes sent by each rank in a train step with TP, CP, EP and PP of 2, 4 and 8, compared with the formula.

Tokens and layers per rank are the same at every size; what grows is the whole sequence, the number of experts or the
number of stages. Every call of torch.distributed is recorded, and counted as the bytes that a rank sends in a ring.
Nothing is timed. Writes Markdown.
"""

import argparse
import importlib
import multiprocessing
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

from machine import at_least_one, describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_ext import device  # noqa: E402 (found by the line above)

device.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from converters.architectures import read_architecture  # noqa: E402
from converters.formats.safetensors import HuggingFaceCheckpoint  # noqa: E402
from converters.layouts.megatron import ParallelSizes  # noqa: E402
from megarl.quickstart.tiny_models import write_tiny_model  # noqa: E402

BYTES = 4
"""Bytes of a float32, the dtype of everything."""
LAYERS, HEADS, KEY_VALUE_HEADS, HEAD, EXPERTS, TOP = 2, 8, 8, 16, 2, 2
"""Per rank for the sharded dimension (layers under PP, experts under EP), else per model."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rank's work."""

    tokens: int
    hidden: int

    @property
    def activation(self) -> int:
        """Bytes of the hidden states of a rank's tokens."""
        return self.tokens * self.hidden * BYTES


class Recorder:
    """Counts the bytes that this rank sends, by kind of call, in groups of more than one rank."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def install(self) -> None:
        """Record every call from now on; to be called before importing megatron, which keeps these functions."""
        counted: Mapping[str, Callable[..., float]] = {
            "all_reduce": lambda n, tensor, *_: 2 * (n - 1) / n * tensor.nbytes,
            "all_gather_into_tensor": lambda n, _output, tensor, *_: (n - 1) * tensor.nbytes,
            "reduce_scatter_tensor": lambda n, _output, tensor, *_: (n - 1) / n * tensor.nbytes,
            "all_gather": lambda n, _outputs, tensor, *_: (n - 1) * tensor.nbytes,
            "all_to_all_single": _bytes_to_others,
        }
        for name, count in counted.items():
            setattr(dist, name, self._counting(name, getattr(dist, name), count))
        send_each = dist.batch_isend_irecv

        def send_each_counted(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
            self.sent["send"] += sum(each.tensor.nbytes for each in p2p_op_list if each.op is dist.isend)
            return send_each(p2p_op_list)

        setattr(dist, "batch_isend_irecv", send_each_counted)  # noqa: B010 - as above, of another type

    def _counting(self, name: str, call: Callable[..., Any], count: Callable[..., float]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **named: Any) -> Any:
            ranks = dist.get_world_size(named.get("group"))
            tensors = [*arguments, *(value for value in named.values() if isinstance(value, Tensor))]
            if ranks > 1:
                self.sent[name] += round(count(ranks, *tensors))
            return call(*arguments, **named)

        return recorded


def _bytes_to_others(ranks: int, _output: Tensor, tensor: Tensor, *_splits: Any) -> float:
    """Assumes that all ranks get the same amount, as the actual split depends on the router."""
    return (ranks - 1) / ranks * tensor.nbytes


@dataclass(frozen=True)
class Case:
    """A kind of parallelism, and the bytes that a rank sends by its formula."""

    model: str
    field: str
    formula: Callable[[Sizes, int], float]
    shown: str


def _tensor(sizes: Sizes, ranks: int) -> float:
    return (10 * LAYERS + 4) * (ranks - 1) * sizes.activation


def _context(sizes: Sizes, ranks: int) -> float:
    keys_and_values = 2 * KEY_VALUE_HEADS * HEAD * BYTES * sizes.tokens
    return 2 * LAYERS * (ranks - 1) * keys_and_values


def _expert(sizes: Sizes, ranks: int) -> float:
    return 4 * LAYERS * (ranks - 1) / ranks * TOP * sizes.activation


def _pipeline(sizes: Sizes, ranks: int) -> float:
    return min(2, ranks - 1) * sizes.activation


CASES: Mapping[str, Case] = {
    "TP": Case("qwen3", "tensor_model_parallel_size", _tensor, "(10 L + 4) (n - 1) t H b"),
    "CP": Case("qwen3", "context_parallel_size", _context, "4 L (n - 1) t K b"),
    "EP": Case("qwen3_moe", "expert_model_parallel_size", _expert, "4 L (n - 1) / n k t H b"),
    "PP": Case("qwen3", "pipeline_model_parallel_size", _pipeline, "2 t H b, of two stages t H b"),
}


def run(name: str, ranks: int, sizes: Sizes, recorder: Recorder) -> list[Counter[str]]:
    """Bytes that each rank sends in a train step, by kind of call."""
    fields = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": LAYERS * (ranks if name == "PP" else 1),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 16 * sizes.tokens,
    }
    if name == "EP":
        fields |= {"num_experts": EXPERTS * ranks, "num_experts_per_tok": TOP}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        model = write_tiny_model(CASES[name].model, Path(folder), fields=fields)
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        # Forked, so that the recorder is installed before megatron is imported, and each process has a copy of it.
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        shared = ranks, name, sizes, model, address, recorder
        processes = [
            context.Process(target=_rank, args=(rank, *shared, pipes[rank][1]), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        return [here.recv() for here, _ in pipes]


def _rank(
    rank: int,
    ranks: int,
    name: str,
    sizes: Sizes,
    folder: Path,
    address: str,
    recorder: Recorder,
    pipe: Connection,
) -> None:
    # Already imported by the parent, with the recorder installed.
    from megarl.algorithms import SftObjective
    from megatron_ext import parallel
    from megatron_ext.megatron_model import MegatronModel
    from megatron_ext.options.options import MegatronOptions
    from megatron_ext.packing.packing import RaggedBatch

    torch.set_num_threads(1)
    cut: dict[str, Any] = {CASES[name].field: ranks}
    parallel_sizes = ParallelSizes(world_size=ranks, **cut)
    parallel.initialize(parallel_sizes, rank, address)
    # Without the distributed optimizer gradients are all-reduced, and all other communication is the model's.
    options = MegatronOptions(
        parallel_sizes, torch.float32, optimizer={"lr": 1e-3}, distributed={"use_distributed_optimizer": False}
    )
    checkpoint = HuggingFaceCheckpoint(folder)
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    tokens = sizes.tokens * (ranks if name in ("TP", "CP") else 1)
    generator = torch.Generator().manual_seed(rank if name == "EP" else 0)
    batch = RaggedBatch(
        torch.randint(4, 60, (tokens,), generator=generator), torch.tensor([tokens]), {"weights": torch.ones(tokens)}
    )
    recorder.sent.clear()
    model.train_step(batch, [[0]], SftObjective())
    pipe.send(recorder.sent)
    dist.barrier()
    parallel.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=at_least_one, default=256, help="of a rank; a multiple of 16")
    parser.add_argument("--hidden", type=at_least_one, default=128)
    parser.add_argument("--ranks", type=at_least_one, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    sizes = Sizes(options.tokens, options.hidden)
    recorder = Recorder()
    recorder.install()
    importlib.import_module("megatron_ext.megatron_model")
    print(f"Machine: {describe(ROOT)}\n")
    print(f"{sizes.tokens} tokens and {LAYERS} layers of a rank, hidden states of {sizes.hidden} in fp32\n")
    print("| n | | formula | by it, bytes | most that a rank sends | ratio | of the mean | all-reduced, bytes |")
    print("|---:|---|---|---:|---:|---:|---:|---:|")
    for name, case in CASES.items():
        for ranks in options.ranks:
            sent = run(name, ranks, sizes, recorder)
            moved = [sum(each.values()) - each["all_reduce"] for each in sent]
            reduced = max(each["all_reduce"] for each in sent)
            formula = case.formula(sizes, ranks)
            ratios = f"{max(moved) / formula:.3f} | {mean(moved) / formula:.3f}"
            shown = f"{formula:,.0f} | {max(moved):,} | {ratios} | {reduced:,}"
            print(f"| {ranks} | {name} | {case.shown} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
