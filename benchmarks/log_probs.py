"""Log-probabilities and entropy from hidden states: memory above inputs and results, and time, forward and backward.

megarl makes the logits of one chunk at a time; beside it the plain computation, which holds them all, and on a GPU
Liger's fused linear cross-entropy, if it is installed. Every figure is of a process of its own. Memory is the peak,
less what was there before the computation and less the two gradients that it gives. On a CPU the seconds are those
that the process computed, which others on the machine hardly change. Writes Markdown.
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from machine import at_least_one, describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_ext import device  # noqa: E402 (found by the line above)

device.install()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_ext.log_probs import linear_log_probs  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """What is computed."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: str


@dataclass(frozen=True)
class Figures:
    """What it took."""

    forward_s: float
    backward_s: float
    memory_mb: float


def inputs(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels; the logits have a standard deviation of about 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=generator)
    weight = torch.randn(size.vocabulary, size.hidden, generator=generator).div_(size.hidden**0.5)
    labels = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
    place, dtype = device.device(), DTYPES[size.dtype]
    return hidden.to(place, dtype).requires_grad_(), weight.to(place, dtype).requires_grad_(), labels.to(place)


def megarl(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of both outputs, by this project."""
    result = linear_log_probs(hidden, weight, labels, None)
    return (result.entropy - result.log_probs).sum()


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same, as one writes it."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (entropy - log_p.gather(1, labels[:, None]).squeeze(1)).sum()


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of the log-probabilities alone: no entropy, and no value for each token."""
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return loss(weight, hidden, labels)


COMPUTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"megarl": megarl, "plain": plain, "Liger": liger}


def measure(name: str, size: Size) -> Figures:
    """In this process, which has computed nothing before."""
    arguments = inputs(size)
    on_cpu = device.device().type == "cpu"
    held = psutil.Process().memory_info().rss if on_cpu else sum(each.nbytes for each in arguments)
    device.synchronize()
    clock = time.process_time if on_cpu else time.perf_counter
    start = clock()
    loss = COMPUTATIONS[name](*arguments)
    device.synchronize()
    middle = clock()
    loss.backward()
    device.synchronize()
    end = clock()
    gradients = arguments[0].nbytes + arguments[1].nbytes
    return Figures(middle - start, end - middle, (device.peak_memory_bytes() - held - gradients) / 1e6)


def measure_apart(name: str, size: Size) -> Figures:
    """In a process of its own."""
    command = [sys.executable, __file__, "--only", name, *(f"--{key}={value}" for key, value in asdict(size).items())]
    return Figures(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def largest_difference(size: Size) -> float:
    """Of the gradients of megarl from those of the plain computation, relative to the largest of each."""
    differences = []
    results = []
    for name in ("megarl", "plain"):
        arguments = inputs(size)
        results.append(torch.autograd.grad(COMPUTATIONS[name](*arguments), arguments[:2]))
    for ours, theirs in zip(*results, strict=True):
        differences.append(float((ours - theirs).abs().max() / theirs.abs().max()))
    return max(differences)


def report(sizes: Sequence[tuple[str, Size]], compared: Size, command: str) -> str:
    """The page."""
    unit = "s" if device.device().type == "cuda" else "CPU s"
    lines = [
        f"| computation | tokens | vocabulary | hidden | type | forward, {unit} | backward, {unit} | memory, MB |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for name, size in sizes:
        found = measure_apart(name, size)
        lines.append(
            f"| {name} | {size.tokens:,} | {size.vocabulary:,} | {size.hidden:,} | {size.dtype}"
            f" | {found.forward_s:.2f} | {found.backward_s:.2f} | {found.memory_mb:,.0f} |"
        )
    where = "a GPU" if device.device().type == "cuda" else "a CPU"
    missing = "" if any(name == "Liger" for name, _ in sizes) else "\n\nLiger's kernels need a GPU and are absent here."
    return (
        f"# Log-probabilities and entropy from hidden states on {where}\n\nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"Machine: {describe(ROOT)}; {torch.get_num_threads()} thread(s)\n\nVersions: torch {torch.__version__}\n\n"
        f"Command: `{command}`\n\n" + "\n".join(lines) + f"{missing}\n\nLargest difference of a gradient from the plain"
        f" computation, at {compared.tokens:,} tokens, relative to the largest element:"
        f" {largest_difference(compared):.1e}\n"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=at_least_one, default=32768)
    parser.add_argument("--vocabulary", type=at_least_one, default=129280)
    parser.add_argument("--hidden", type=at_least_one, default=256)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--plain-tokens", type=at_least_one, default=1024, help="where all logits fit into memory")
    parser.add_argument("--write", type=Path, help="the page is written here, too")
    parser.add_argument("--only", choices=COMPUTATIONS, help="one computation of --tokens, in this process; JSON")
    options = parser.parse_args()
    whole = Size(options.tokens, options.vocabulary, options.hidden, options.dtype)
    if options.only:
        print(json.dumps(asdict(measure(options.only, whole))))
        return
    small = Size(options.plain_tokens, options.vocabulary, options.hidden, options.dtype)
    sizes = [("megarl", whole), ("megarl", small), ("plain", small)]
    if device.device().type == "cuda" and importlib.util.find_spec("liger_kernel"):
        sizes += [("Liger", whole), ("Liger", small)]
    page = report(sizes, small, "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    print(page)
    if options.write:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
