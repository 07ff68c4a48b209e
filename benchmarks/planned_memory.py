"""Memory of a rank as `megarl plan` counts it, compared with allocations by the real modules and optimizer.

Small models are run with every kind of parallelism on CPU ranks, with and without recomputation. Weights, gradients and
optimizer state are measured by their storages; activations by the peak of what autograd keeps for the backward pass,
each storage once. Writes Markdown.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/megatron_ext")]

import torch  # noqa: E402
from launch import run_in_turn  # type: ignore[import-not-found]  # noqa: E402 (found by the line above)
from torch import Tensor  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # noqa: E402

from converters.architectures import read_architecture  # noqa: E402
from converters.layouts.parallel_sizes import ParallelSizes  # noqa: E402
from megarl.algorithms import SftObjective  # noqa: E402
from megarl.planning.memory.activations import PLAIN  # noqa: E402
from megarl.planning.memory.trainer import TrainingOptions, trainer_memory  # noqa: E402
from megatron_ext.megatron_model import MegatronModel  # noqa: E402
from megatron_ext.memory.storages import nbytes_of, storages_of  # noqa: E402
from megatron_ext.optimizer.fully_sharded import FullySharded, own_rows  # noqa: E402
from megatron_ext.options.options import MegatronOptions  # noqa: E402
from megatron_ext.packing.packing import RaggedBatch  # noqa: E402

WITHIN = 0.1
"""Target: maximum relative error of a count."""
SEQUENCES, LENGTH, MICRO_BATCHES = 4, 128, 3
"""Sequences per micro-batch, tokens per sequence, micro-batches per step."""
PARTS = ("weights", "gradients", "optimizer", "gathered", "activations")

_SMALL = {
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 544,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "vocab_size": 1000,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 40, "attention_bias": False}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 104, "norm_topk_prob": True}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_GROUPED, "model_type": "qwen3"},
    "qwen3_moe": {
        **_GROUPED,
        **_ROUTED,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        **_SMALL,
        **_ROUTED,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "q_lora_rank": 48,
        "kv_lora_rank": 56,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
}
"""config.json of small models whose parts all have different widths."""
LAYOUTS: Mapping[str, ParallelSizes] = {
    "one rank": ParallelSizes(),
    "TP 2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP 2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "CP 2": ParallelSizes(world_size=2, context_parallel_size=2),
    "DP 2": ParallelSizes(world_size=2),
    "EP 2": ParallelSizes(world_size=2, expert_model_parallel_size=2),
    "TP 2, EP 2": ParallelSizes(
        world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    ),
    "DP 2, FSDP2": ParallelSizes(world_size=2, use_torch_fsdp2=True),
    "CP 2, FSDP2": ParallelSizes(world_size=2, context_parallel_size=2, use_torch_fsdp2=True),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {"none": {}, "full": FULL}


class Measured(NamedTuple):
    """Bytes of a rank, and the load of its experts."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Peak of FSDP2's gathered weights and gradients; 0 without FSDP2."""
    activations: int
    expert_load: float
    """Tokens of the busiest rank's experts in any layer, relative to the mean."""


@dataclass(frozen=True)
class Compared:
    """The counted and measured memory of a rank."""

    rank: int
    counted: Mapping[str, int]
    measured: Measured

    @property
    def ratios(self) -> dict[str, float]:
        """Part -> counted over measured, for all parts that exist."""
        pairs = {part: (self.counted[part], getattr(self.measured, part)) for part in PARTS}
        return {part: counted / measured if measured else inf for part, (counted, measured) in pairs.items() if counted}


class _Kept:
    """A tensor kept for the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Activations:
    """Peak bytes kept by autograd at the start of and during backward passes, without weights."""

    def __init__(self, weights: Callable[[], Iterable[torch.UntypedStorage]]) -> None:
        """`weights` is called repeatedly, since FSDP2 allocates memory for gathered ones in the first pass."""
        self.peak = 0
        self._weights = weights
        self._kept: WeakSet[_Kept] = WeakSet()
        self._grew = False

    def keep(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._kept.add(kept)
        self._grew = True
        return kept

    def give(self, kept: _Kept) -> Tensor:
        if self._grew:
            storages = storages_of(each.tensor for each in self._kept)
            weights = {each._cdata for each in self._weights()}
            self.peak = max(self.peak, nbytes_of(each for each in storages if each._cdata not in weights))
            self._grew = False
        return kept.tensor


class _Gathered:
    """Peak of FSDP2's gathered weights and gradients in `chunks`, sampled whenever the backward pass of a layer ends.

    torch does not report them, so they are found in its internal objects.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        modules = [each for chunk in chunks for each in chunk.modules() if isinstance(each, FSDPModule)]
        self._groups = [group for each in modules if (group := each._get_fsdp_state()._fsdp_param_group)]
        self.peak = 0
        """Bytes of weights and gradients together."""

    def weights(self) -> list[torch.UntypedStorage]:
        """Storages for gathered weights, which are empty while the weights are not gathered."""
        parameters = [each for group in self._groups for each in group.fsdp_params]
        return storages_of(chain.from_iterable(each.all_gather_outputs for each in parameters))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample whenever the backward pass of a layer ends."""
        post_backward = FSDPParamGroup.post_backward

        def look_before(group: FSDPParamGroup, *unused: Any) -> None:
            self._look()
            post_backward(group, *unused)

        with patch.object(FSDPParamGroup, "post_backward", look_before):
            yield

    def _look(self) -> None:
        parameters = [each for group in self._groups for each in group.fsdp_params]
        whole = [each._unsharded_param.grad for each in parameters if hasattr(each, "_unsharded_param")]
        coming = [group._all_gather_result.all_gather_output for group in self._groups if group._all_gather_result]
        states = self._groups[0].comm_ctx.reduce_scatter_states
        others = (
            each for each in (*whole, *coming, *(state.reduce_scatter_input for state in states)) if each is not None
        )
        self.peak = max(self.peak, nbytes_of(self.weights()) + nbytes_of(storages_of(others)))


def measure(rank: int, sizes: ParallelSizes, model: str, transformer: Mapping[str, Any]) -> Measured:
    """Run one train step of a rank."""
    torch.manual_seed(0)
    options = MegatronOptions(sizes, torch.bfloat16, transformer=transformer, optimizer={"lr": 1e-3})
    engine = MegatronModel(read_architecture(MODELS[model]), options, rank)
    for tensor in engine.local_tensors().values():
        if tensor.dim() > 1:
            torch.nn.init.normal_(tensor, std=0.02)
    engine.prepare_training(10)
    weights, gathered = storages_of(engine._weight_tensors()), _Gathered(engine.bare_chunks)
    activations = _Activations(lambda: (*weights, *gathered.weights()))
    hooks = torch.autograd.graph.saved_tensors_hooks(activations.keep, activations.give)
    with hooks, gathered.watched():
        result = engine.train_step(*_work(), SftObjective())
    own = {storage._cdata for storage in weights}
    training = [each for each in storages_of(engine._training_tensors()) if each._cdata not in own]
    return Measured(
        nbytes_of(weights),
        nbytes_of(storages_of(_gradients(engine))),
        nbytes_of(training),
        gathered.peak,
        activations.peak,
        _load(result.expert_load, sizes.expert_model_parallel_size),
    )


def _gradients(engine: MegatronModel) -> Iterator[Tensor]:
    """The gradients after a step: Megatron's buffers, or with FSDP2 the optimizer's copies for a rank's rows."""
    for chunk in engine.chunks:
        if isinstance(chunk, FullySharded):
            parameters = (each for group in engine.optimizer.param_groups for each in group["params"])
            yield from (own_rows(each.grad) for each in parameters if each.grad is not None)
        else:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


def _work() -> tuple[RaggedBatch, list[list[int]]]:
    sequences = SEQUENCES * MICRO_BATCHES
    tokens = torch.randint(4, 1000, (sequences * LENGTH,), generator=torch.Generator().manual_seed(1))
    weights = torch.full((len(tokens),), 1 / len(tokens))
    batch = RaggedBatch(tokens, torch.full((sequences,), LENGTH), {"weights": weights})
    return batch, [list(range(start, start + SEQUENCES)) for start in range(0, sequences, SEQUENCES)]


def _load(counts: Tensor | None, ranks: int) -> float:
    if counts is None or ranks == 1:
        return 1.0
    of_ranks = counts.double().unflatten(-1, (ranks, -1)).sum(-1)
    busy = of_ranks.sum(-1) > 0
    return float((of_ranks[busy].amax(-1) / of_ranks[busy].mean(-1)).max())


def compare(model: str, layouts: Sequence[str], recomputed: Mapping[str, Any]) -> dict[str, list[Compared]]:
    """Layout -> its ranks; all layouts have the same number of ranks."""
    cases = [(measure, LAYOUTS[layout], model, recomputed) for layout in layouts]
    return {
        layout: [Compared(rank, count(model, LAYOUTS[layout], recomputed, rank, found), found) for rank, found in ranks]
        for layout, ranks in zip(layouts, map(enumerate, run_in_turn(cases)), strict=True)
    }


def count(
    model: str, sizes: ParallelSizes, recomputed: Mapping[str, Any], rank: int, measured: Measured
) -> dict[str, int]:
    """Bytes that the plan counts for a rank, whose experts get the measured number of tokens."""
    options = replace(TrainingOptions.of(recomputed), kernels=PLAIN, expert_load=measured.expert_load)
    stages = trainer_memory(
        read_architecture(MODELS[model]),
        sizes,
        options,
        micro_batch_tokens=SEQUENCES * LENGTH,
        micro_batches=MICRO_BATCHES,
    )
    return stages[sizes.coordinates(rank).pipeline].parts


def table() -> Iterator[str]:
    """Yield the table, with each layout's rank whose activations have the largest error."""
    yield "| model | layout | recomputed | " + " | ".join(f"{part}, kB" for part in PARTS) + " | farthest off |"
    yield "|---|---|---|" + "---:|" * (len(PARTS) + 1)
    for model in MODELS:
        for name, recomputed in RECOMPUTE.items():
            for ranks in (1, 2):
                layouts = [each for each in LAYOUTS if LAYOUTS[each].world_size == ranks and suits(model, each)]
                for layout, found in compare(model, layouts, recomputed).items():
                    worst = max(found, key=lambda each: abs(each.ratios["activations"] - 1))
                    figures = " | ".join(
                        f"{worst.counted[part] / 1e3:,.0f} / {getattr(worst.measured, part) / 1e3:,.0f}"
                        for part in PARTS
                    )
                    off = max(abs(ratio - 1) for each in found for ratio in each.ratios.values())
                    yield f"| {model} | {layout} | {name} | {figures} | {off:.1%} |"


def suits(model: str, layout: str) -> bool:
    """Whether a model can be sharded by a layout."""
    return "EP" not in layout or model != "qwen3"


def main() -> None:
    """Measure and print; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args()
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    if options.markdown is not None:
        options.markdown.write_text("# Memory of a rank: counted / measured\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
