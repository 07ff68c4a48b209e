"""Tokens per second of log-probs and of an update, on one rank: with and without shared prefixes; versus transformers.

The first table has groups of responses to each prompt, whose tokens count as often as a plain computation processes
them. The second has sequences whose lengths vary by a factor of 8, on this project's rank and on the same model in
transformers with AdamW, where rows are padded to the longest. It also has the peak memory of a process with only one of
the two, and the share of the device's peak in bf16. Runs alternate, and figures are medians, of CPU time or, on a GPU,
wall time. Writes Markdown. A GPU is used if there is one:

    .venv/bin/python benchmarks/train_step.py --dtype bf16 --models dense_1b moe_2b --prefix-model dense_1b \
        --response 512 --max-tokens 32768
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

from machine import at_least_one, describe, give_out
from models_by_size import LARGE, MODELS, write_model

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_ext import device  # noqa: E402 (found by the line above)

device.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

from converters.architectures import read_architecture  # noqa: E402
from converters.cost.compute import forward_flops, update_flops  # noqa: E402
from converters.cost.devices import peak_bf16_flops  # noqa: E402
from converters.formats.safetensors import HuggingFaceCheckpoint  # noqa: E402
from converters.layouts.megatron import ParallelSizes  # noqa: E402
from megarl.algorithms.supervised import SftObjective  # noqa: E402
from megarl.process.ports import free_port  # noqa: E402
from megatron_ext import parallel  # noqa: E402
from megatron_ext.megatron_model import MegatronModel  # noqa: E402
from megatron_ext.options.options import MegatronOptions  # noqa: E402
from megatron_ext.packing.balance import assign  # noqa: E402
from megatron_ext.packing.packing import RaggedBatch  # noqa: E402
from megatron_ext.packing.prefix_tree import Prefixes  # noqa: E402

VOCABULARY = 50
LEARNING_RATE = 1e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLOSE_ENOUGH = {"fp32": 1e-3, "bf16": 0.05}
"""Allowed relative difference of the contenders' log-probs and gradient norms."""
OPTIMIZER = {"lr": LEARNING_RATE, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.01}


class Work(NamedTuple):
    """Sequences to compute with."""

    batch: RaggedBatch
    prefixes: Prefixes

    @classmethod
    def of(cls, batch: RaggedBatch) -> "Work":
        """Make the work, finding the sequences' shared prefixes."""
        tokens = batch.tokens.split(batch.lengths.tolist())
        return cls(batch, Prefixes.of([each.numpy() for each in tokens]))


def groups(prompts: int, prompt: int, response: int, samples: int) -> Work:
    """`samples` responses to each prompt, of which only the responses are trained on."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, length: int) -> Tensor:
        return torch.randint(4, VOCABULARY, (count, length), generator=generator)

    beginnings = drawn(prompts, prompt).repeat_interleave(samples, 0)
    tokens = torch.cat([beginnings, drawn(prompts * samples, response)], dim=1)
    weights = torch.cat([torch.zeros(prompt), torch.ones(response)]).repeat(len(tokens)) / (len(tokens) * response)
    lengths = torch.full((len(tokens),), prompt + response)
    return Work.of(RaggedBatch(tokens.flatten(), lengths, {"weights": weights}))


def spread(sequences: int, shortest: int) -> Work:
    """Sequences of `shortest` to 8 times as many tokens, all of which are trained on."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(shortest, 8 * shortest, sequences).long()[torch.randperm(sequences, generator=generator)]
    total = int(lengths.sum())
    tokens = torch.randint(4, VOCABULARY, (total,), generator=generator)
    weights = torch.full((total,), 1 / total).masked_fill_(_first_tokens(lengths), 0)
    return Work.of(RaggedBatch(tokens, lengths, {"weights": weights}))


def _first_tokens(lengths: Tensor) -> Tensor:
    is_first = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    is_first[lengths.cumsum(0) - lengths] = True
    return is_first


class MegatronRank:
    """This project's model on one rank."""

    def __init__(self, folder: Path, max_tokens: int, dtype: torch.dtype, *, shared: bool = False) -> None:
        checkpoint = HuggingFaceCheckpoint(folder)
        architecture = read_architecture(checkpoint.config)
        options = MegatronOptions(
            ParallelSizes(),
            dtype,
            optimizer=OPTIMIZER,
            distributed={"use_distributed_optimizer": False},
            shared_prefixes=shared,
        )
        self._model = MegatronModel(architecture, options, 0)
        self._model.load_huggingface(checkpoint)
        self._model.prepare_training(1000)
        self._shared, self._max_tokens = shared, max_tokens
        self._attention_length = forward_flops(architecture).attention_length

    def _cut(self, work: Work) -> list[list[int]]:
        known = work.prefixes if self._shared else None
        length = self._attention_length
        return assign(work.batch.lengths, 1, self._max_tokens, attention_length=length, prefixes=known)[0]

    def log_probs(self, work: Work) -> float:
        """Compute log-probs; return their mean over the tokens that are trained on."""
        found = self._model.log_probs(work.batch, self._cut(work), temperature=1.0)
        assert found is not None
        return float((found.log_probs * work.batch.fields["weights"]).sum())

    def update(self, work: Work) -> float:
        """Take one optimizer step; return the gradient norm."""
        return self._model.train_step(work.batch, self._cut(work), SftObjective()).gradient_norm


class PaddedTransformers:
    """The same model in transformers: rows in their given order, padded to the longest of a micro-batch."""

    def __init__(self, folder: Path, max_tokens: int, dtype: torch.dtype, *, by_mkl: bool = False) -> None:
        self._by_mkl = by_mkl
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device.device())
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
        )
        self._max_tokens = max_tokens

    def _micro_batches(self, work: Work) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Tokens, mask and weights of as many rows as fit into `max_tokens`, padding included."""
        lengths = work.batch.lengths.tolist()
        rows = max(1, self._max_tokens // max(lengths))
        tokens, weights = (each.split(lengths) for each in (work.batch.tokens, work.batch.fields["weights"]))
        pad = torch.nn.utils.rnn.pad_sequence
        found = []
        for start in range(0, len(lengths), rows):
            chosen = slice(start, start + rows)
            mask = pad([torch.ones(length, dtype=torch.long) for length in lengths[chosen]], batch_first=True)
            found.append((pad(tokens[chosen], batch_first=True), mask, pad(weights[chosen], batch_first=True)))
        return found

    def _weighted(self, *on_host: Tensor) -> Tensor:
        tokens, mask, weights = (each.to(device.device()) for each in on_host)
        logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return (log_probs * weights[:, 1:]).sum()

    @torch.no_grad()
    def log_probs(self, work: Work) -> float:
        """See `MegatronRank`."""
        self._model.eval()
        with _multiplying(by_mkl=self._by_mkl):
            return float(sum(self._weighted(*each) for each in self._micro_batches(work)))

    def update(self, work: Work) -> float:
        """See `MegatronRank`."""
        self._model.train()
        self._optimizer.zero_grad()
        with _multiplying(by_mkl=self._by_mkl):
            for each in self._micro_batches(work):
                (-self._weighted(*each)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(norm)


@contextmanager
def _multiplying(*, by_mkl: bool) -> Iterator[None]:
    """Within the context, multiply matrices as set up by `device.install`, or with MKL, torch's default."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    chosen = matmul.fp32_precision
    if by_mkl:
        matmul.fp32_precision = "none"
    try:
        yield
    finally:
        matmul.fp32_precision = chosen


Contender = MegatronRank | PaddedTransformers


def compare(
    contenders: Mapping[str, Contender], work: Work, repeats: int, close_enough: float = CLOSE_ENOUGH["fp32"]
) -> dict[str, float]:
    """Seconds by contender and stage: the median of alternating runs after one warm-up run.

    Raises ValueError if their results differ.
    """
    stages: dict[str, Callable[..., float]] = {
        f"{name} {stage}": getattr(contender, stage)
        for stage in ("log_probs", "update")
        for name, contender in contenders.items()
    }
    results, seconds = {}, {key: list[float]() for key in stages}
    for repeat in range(repeats + 1):
        for key, run in stages.items():
            device.synchronize()
            start = _clock()
            results[key] = run(work)
            device.synchronize()
            if repeat:
                seconds[key].append(_clock() - start)
    for stage in ("log_probs", "update"):
        values = [results[f"{name} {stage}"] for name in contenders]
        if not np.allclose(values, values[0], rtol=close_enough):
            raise ValueError(f"the contenders' {stage} differ: {results}")
    return {key: median(each) for key, each in seconds.items()}


def _clock() -> float:
    return time.process_time() if device.device().type == "cpu" else time.perf_counter()


def _peak_memory(contender: Callable[[], Contender], work: Work) -> int:
    """Peak memory of this process, which must be new."""
    torch.set_num_threads(1)
    parallel.initialize(ParallelSizes(), 0, f"tcp://127.0.0.1:{free_port('127.0.0.1', 0)}")
    one = contender()
    one.log_probs(work)
    one.update(work)
    parallel.shutdown()
    return device.peak_memory_bytes()


def memory_alone(contender: Callable[[], Contender], work: Work) -> int:
    """Peak memory of a new process that computes only log-probs and an update."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak_memory, contender, work).result()


def shared_prefixes(folder: Path, options: argparse.Namespace) -> list[str]:
    """Table rows, one per shape of a group."""
    write_model(options.prefix_model, folder)
    contenders = {
        name: MegatronRank(folder, options.max_tokens, DTYPES[options.dtype], shared=name == "shared")
        for name in ("plain", "shared")
    }
    lines = [
        "| P | R | G | arithmetic gain | log-probs, plain | shared | gain | of the arithmetic | update, plain | shared"
        " | gain | of the arithmetic |",
        "|---:" * 12 + "|",
    ]
    for ratio in options.ratios:
        for samples in options.samples:
            prompt = ratio * options.response
            work = groups(options.prompts, prompt, options.response, samples)
            seconds = compare(contenders, work, options.repeats, CLOSE_ENOUGH[options.dtype])
            gain = (prompt + options.response) * samples / (prompt + options.response * samples)
            row = f"| {prompt} | {options.response} | {samples} | {gain:.2f} "
            for stage in ("log_probs", "update"):
                plain, shared = (seconds[f"{name} {stage}"] for name in contenders)
                tokens = len(work.batch.tokens)
                row += f"| {tokens / plain:,.0f} | {tokens / shared:,.0f} | {plain / shared:.2f} "
                row += f"| {plain / shared / gain:.2f} "
            lines.append(row + "|")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def beside_transformers(folder: Path, options: argparse.Namespace) -> list[str]:
    """Table rows, one per model."""
    lines = [
        "| model | sequences | tokens | log-probs, megarl | transformers | ratio | update, megarl | transformers"
        " | ratio | GB, megarl | transformers | MFU of log-probs, megarl | of an update |",
        "|---|" + "---:|" * 12,
    ]
    for model in options.models:
        place = write_model(model, folder / model)
        sizes = {"smollm2": options.real_size, **dict.fromkeys(LARGE, options.large_size)}
        sequences, shortest, limit = sizes.get(model, options.tiny_size)
        work, dtype = spread(sequences, shortest), DTYPES[options.dtype]
        makers: dict[str, Callable[[], Contender]] = {
            "megarl": partial(MegatronRank, place, limit, dtype),
            "transformers": partial(PaddedTransformers, place, limit, dtype, by_mkl=options.by_mkl),
        }
        memory = [memory_alone(maker, work) / 1e9 for maker in makers.values()]
        contenders = {name: maker() for name, maker in makers.items()}
        seconds = compare(contenders, work, options.repeats, CLOSE_ENOUGH[options.dtype])
        tokens = len(work.batch.tokens)
        row = f"| {model} | {sequences} | {tokens:,} "
        for stage in ("log_probs", "update"):
            ours, theirs = (seconds[f"{name} {stage}"] for name in contenders)
            row += f"| {tokens / ours:,.0f} | {tokens / theirs:,.0f} | {theirs / ours:.2f} "
        row += f"| {memory[0]:.2f} | {memory[1]:.2f} | {' | '.join(_mfu(place, work, seconds, options.peak_tflops))} |"
        lines.append(row)
        print(row, file=sys.stderr, flush=True)
    return lines


def _mfu(folder: Path, work: Work, seconds: Mapping[str, float], peak_tflops: float | None) -> list[str]:
    """The share of peak FLOPS that log-probs and an update reach; a dash if the peak is unknown."""
    peak = 1e12 * peak_tflops if peak_tflops else peak_bf16_flops(device.name())
    if peak is None:
        return ["-", "-"]
    architecture, lengths = read_architecture(HuggingFaceCheckpoint(folder).config), work.batch.lengths
    work_of = {"log_probs": forward_flops(architecture), "update": update_flops(architecture)}
    return [
        f"{each.of(int(lengths.sum()), int(lengths.square().sum())) / seconds[f'megarl {stage}'] / peak:.3g}"
        for stage, each in work_of.items()
    ]


def report(options: argparse.Namespace) -> str:
    """The page."""
    unit = "CPU second" if device.device().type == "cpu" else "second"
    lines = [
        f"# Tokens a {unit} of log-probs and an update, on one rank",
        f"Date: {time.strftime('%Y-%m-%d')}",
        f"Machine: {describe(ROOT)}; {torch.get_num_threads()} thread(s); {device.name()}",
        f"Versions: torch {torch.__version__}, transformers {transformers.__version__}",
        "Command: `.venv/bin/python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) + "`",
    ]
    parallel.initialize(ParallelSizes(), 0, f"tcp://127.0.0.1:{free_port('127.0.0.1', 0)}")
    with tempfile.TemporaryDirectory() as folder:
        if "prefixes" in options.parts:
            lines += [
                "## Shared prefixes",
                f"The model {options.prefix_model} in {options.dtype}, {options.prompts} prompts of P tokens with G"
                " responses of R tokens each,"
                f" in micro-batches of at most {options.max_tokens:,} tokens. Tokens are those of the plain"
                " computation, in which every response brings its prompt. The arithmetic gain is"
                " (P + R) G / (P + R G).",
                "\n".join(shared_prefixes(Path(folder), options)),
            ]
        if "transformers" in options.parts:
            lines += [
                "## Beside transformers with padding",
                f"The same model, batch and {options.dtype}, AdamW, lengths spread evenly from 1 to 8. Tokens are"
                " without padding. GB are the most that a process with one of the two alone holds, of a GPU's memory"
                " or resident; transformers has its optimizer in the type of its weights, megarl in fp32. MFU is"
                " without recomputation.",
                "\n".join(beside_transformers(Path(folder), options)),
            ]
    parallel.shutdown()
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print the page or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["prefixes", "transformers"], default=["prefixes", "transformers"]
    )
    parser.add_argument("--ratios", nargs="+", type=at_least_one, default=[1, 4, 16], help="P / R")
    parser.add_argument("--response", type=at_least_one, default=32, help="R")
    parser.add_argument("--samples", nargs="+", type=at_least_one, default=[8, 16], help="G")
    parser.add_argument("--prompts", type=at_least_one, default=16)
    parser.add_argument("--max-tokens", type=at_least_one, default=8192, help="of a micro-batch of the first table")
    parser.add_argument("--prefix-model", choices=MODELS, default="qwen3_moe", help="of the first table")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3_moe", "smollm2"], help="of the second")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights; main parameters are in fp32")
    parser.add_argument("--peak-tflops", type=float, help="in bf16, where the device is not a GPU that is known")
    parser.add_argument("--by-mkl", action="store_true", help="transformers multiplies by MKL, torch's own choice")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--write", type=Path, help="a Markdown file, in place of standard output")
    size = "sequences, tokens of the shortest and of a micro-batch, of the second table"
    parser.add_argument("--tiny-size", nargs=3, type=at_least_one, default=[64, 32, 4096], help=size)
    parser.add_argument("--real-size", nargs=3, type=at_least_one, default=[16, 24, 1024], help="the same of smollm2")
    large = "the same of the models for a GPU"
    parser.add_argument("--large-size", nargs=3, type=at_least_one, default=[64, 512, 16384], help=large)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report(options)
    give_out(text, options.write)


if __name__ == "__main__":
    main()
