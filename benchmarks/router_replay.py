"""Replayed routing: how often engine and trainer choose other experts, and how far their log-probs are apart by that.

The transformers engine samples from a small Qwen3-MoE model with random weights; one Megatron rank computes the
log-probs of the same tokens from the same weights, by its own routing and by the engine's. Writes Markdown.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from machine import at_least_one, describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_ext import device  # noqa: E402 (found by the line above)

device.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from torch import Tensor  # noqa: E402

from converters.architectures import read_architecture  # noqa: E402
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json  # noqa: E402
from converters.layouts.megatron import ParallelSizes  # noqa: E402
from megarl.data import Turn  # noqa: E402
from megarl.data.stretches import fetch, fetch_each  # noqa: E402
from megarl.process.ports import free_port  # noqa: E402
from megarl.quickstart.tiny_models import write_tiny_model  # noqa: E402
from megarl.rollout.protocol import Request, SamplingParameters  # noqa: E402
from megarl.rollout.transformers.engine import TransformersEngine  # noqa: E402
from megatron_ext import parallel  # noqa: E402
from megatron_ext.megatron_model import MegatronModel  # noqa: E402
from megatron_ext.options.options import MegatronOptions  # noqa: E402
from megatron_ext.packing.packing import RaggedBatch, pack  # noqa: E402
from megatron_ext.routing.routed_experts import Routing  # noqa: E402

MODEL = {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
ROUTING = Routing(layers=6, topk=4, experts=32)
DTYPES = {"bf16": ("bfloat16", torch.bfloat16), "fp32": ("float32", torch.float32)}
PROMPT, RESPONSE, SAMPLES = 32, 96, 16


class Figures(NamedTuple):
    """Figures of one arithmetic."""

    choices: float
    """Share of the choices of a token in a layer that differ."""
    tokens: float
    """Share of the tokens with such a choice in any layer."""
    own: Tensor
    """|engine - trainer| of the sampled tokens' log-probs, by the trainer's own routing."""
    replayed: Tensor
    """The same by the engine's."""


def main() -> None:
    """Compare both kinds of arithmetic, and print the table or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=at_least_one, default=8, help=f"prompts, of {SAMPLES} samples each")
    parser.add_argument("--write", type=Path, help="a Markdown file, in place of standard output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Routing that is replayed, on a CPU",
        f"Date: {time.strftime('%Y-%m-%d')}",
        f"Machine: {describe(Path(tempfile.gettempdir()))}",
        f"Versions: torch {torch.__version__}, transformers {transformers.__version__}",
        f"Command: `.venv/bin/python benchmarks/router_replay.py --prompts {arguments.prompts}`",
        f"Qwen3-MoE, random weights, {MODEL}; {arguments.prompts * SAMPLES} responses of up to {RESPONSE} tokens."
        " A choice is of a token in a layer. Gaps are |engine - trainer| of the sampled tokens' log-probs, in nats.",
        "\n".join(_HEADER + rows(arguments.prompts)),
    ]
    text = "\n\n".join(lines)
    if arguments.write is None:
        print(text)
    else:
        arguments.write.write_text(f"{text}\n")


_HEADER = [
    "| arithmetic | choices that differ | tokens with one | mean gap | replayed | largest gap | replayed |",
    "|---|---:|---:|---:|---:|---:|---:|",
]


def rows(prompts: int) -> list[str]:
    """A row of the table for each kind of arithmetic."""
    found = []
    parallel.initialize(ParallelSizes(), 0, f"tcp://127.0.0.1:{free_port('127.0.0.1', 0)}")
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model("qwen3_moe", Path(folder), fields=MODEL)
        for name in DTYPES:
            of = compare(Path(folder), name, prompts)
            gaps = " | ".join(
                f"{gap:.2g}" for gap in (of.own.mean(), of.replayed.mean(), of.own.max(), of.replayed.max())
            )
            found.append(f"| {name} | {of.choices:.2%} | {of.tokens:.2%} | {gaps} |")
    parallel.shutdown()
    return found


def compare(folder: Path, name: str, prompts: int) -> Figures:
    """Sample from the model of `folder`, and compute the same tokens' log-probs by both routings."""
    engine_dtype, dtype = DTYPES[name]
    turns = sampled(folder, engine_dtype, prompts)
    batch = to_batch(turns)
    micro_batches = [[index] for index in range(len(batch))]
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), MegatronOptions(ParallelSizes(), dtype), 0)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.freeze()
    chosen = choices_of(model)
    replayed = model.log_probs(batch, micro_batches, temperature=1.0)
    chosen.clear()
    own = model.log_probs(RaggedBatch(batch.tokens, batch.lengths), micro_batches, temperature=1.0)
    assert own is not None, "one rank has the last stage"
    assert replayed is not None
    layers = [torch.cat([maps[layer] for maps in by_micro_batch(chosen)]) for layer in range(ROUTING.layers)]
    records = pack(batch, range(len(batch))).routed_experts
    assert records is not None
    engines = ROUTING.experts_of(records, range(ROUTING.layers)).long()
    is_recorded = engines[:, 0, 0] >= 0
    maps = torch.stack(layers, 1)[is_recorded]
    theirs = torch.zeros_like(maps).scatter(2, engines[is_recorded], True)
    differs = (maps != theirs).any(-1)
    is_sampled = torch.cat([torch.arange(PROMPT + len(each.token_ids)) >= PROMPT for each in turns])
    engine_log_probs = torch.from_numpy(np.concatenate([fetch(each.log_probs) for each in turns]))
    gaps = [(each.log_probs[is_sampled] - engine_log_probs).abs() for each in (own, replayed)]
    return Figures(float(differs.float().mean()), float(differs.any(-1).float().mean()), *gaps)


def sampled(folder: Path, dtype: str, prompts: int) -> list[Turn]:
    """Responses of the engine to random prompts."""
    generator = np.random.default_rng(0)
    engine = TransformersEngine(folder, {"dtype": dtype, "enable_return_routed_experts": True, "float32_logits": True})
    engine.start()
    sampling = [SamplingParameters(samples=SAMPLES, max_tokens=RESPONSE, seed=seed) for seed in range(prompts)]
    answers = engine.generate([Request(generator.integers(4, 60, PROMPT).tolist(), each) for each in sampling])
    engine.close()
    return [turn for of_prompt in answers for turn in of_prompt]


def to_batch(turns: list[Turn]) -> RaggedBatch:
    """The turns' tokens, with the records of their experts."""
    tokens = np.concatenate([fetch(part) for each in turns for part in (each.prompt_ids, each.token_ids)])
    lengths = torch.tensor([PROMPT + len(each.token_ids) for each in turns])
    records = fetch_each([each.routed_experts for each in turns])
    return RaggedBatch(torch.from_numpy(tokens), lengths, routed_experts=records)


def choices_of(model: MegatronModel) -> list[Tensor]:
    """A list to which every pass adds what its routers choose: bool[tokens, experts], layer after layer."""
    chosen: list[Tensor] = []
    for chunk in model.bare_chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(lambda _router, _inputs, output: chosen.append(output[1]))
    return chosen


def by_micro_batch(chosen: list[Tensor]) -> list[list[Tensor]]:
    """The choices of each micro-batch, by layer."""
    return [chosen[start : start + ROUTING.layers] for start in range(0, len(chosen), ROUTING.layers)]


if __name__ == "__main__":
    main()
