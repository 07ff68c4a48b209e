"""Log-probs and entropy from hidden states: memory in addition to inputs and results, and time, forward and backward.

megarl computes the logits of one chunk at a time, with the vocabulary on one rank or sharded over several. It is
compared with the plain computation, which holds all logits, and on a GPU with Liger's fused linear cross-entropy, if it
is installed. Every figure comes from separate processes, and is the maximum over ranks. Memory is the peak, minus what
was in use before and minus the two gradients that are returned. On a CPU the seconds are CPU time, on which other
processes have little effect. Writes Markdown.
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import psutil
from machine import at_least_one, describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_ext import device  # noqa: E402 (found by the line above)

device.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_ext.log_probs import linear_log_probs  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """Size of a computation."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: str


@dataclass(frozen=True)
class Figures:
    """Time and peak memory of a computation."""

    forward_s: float
    backward_s: float
    memory_mb: float


@dataclass(frozen=True)
class Rank:
    """One of the processes over which the vocabulary is sharded."""

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def joined(index: int, count: int, store: Path | None) -> "Rank":
        """Join the other processes through the file `store`; a single process joins nothing."""
        device.bind(index)
        if count == 1:
            return Rank()
        assert store is not None, "ranks meet at --store"
        dist.init_process_group(
            device.backend(), init_method=f"file://{store}", rank=index, world_size=count, timeout=timedelta(minutes=30)
        )
        return Rank(index, count, dist.group.WORLD)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows."""
        return whole.chunk(self.count)[self.index]


def inputs(size: Size, rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, this rank's part of the weight, and labels; the logits have a standard deviation of about 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=generator)
    weight = torch.randn(size.vocabulary, size.hidden, generator=generator).div_(size.hidden**0.5)
    labels = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
    place, dtype = device.device(), DTYPES[size.dtype]
    if rank.count > 1:
        # A copy, so that the whole weight can be freed.
        weight = rank.part(weight).clone()
    return hidden.to(place, dtype).requires_grad_(), weight.to(place, dtype).requires_grad_(), labels.to(place)


def megarl(hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The loss of both outputs with megarl."""
    result = linear_log_probs(hidden, weight, labels, group)
    return (result.entropy - result.log_probs).sum()


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, _group: None) -> Tensor:
    """The same in plain torch."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (entropy - log_p.gather(1, labels[:, None]).squeeze(1)).sum()


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, _group: None) -> Tensor:
    """Only the sum of the log-probs: no entropy, and no per-token values."""
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return loss(weight, hidden, labels)


COMPUTATIONS: dict[str, Callable[..., Tensor]] = {"megarl": megarl, "plain": plain, "Liger": liger}


def measure(name: str, size: Size, rank: Rank) -> Figures:
    """Measure in this process, which must be fresh."""
    arguments = inputs(size, rank)
    on_cpu = device.device().type == "cpu"
    held = psutil.Process().memory_info().rss if on_cpu else sum(each.nbytes for each in arguments)
    device.synchronize()
    clock = time.process_time if on_cpu else time.perf_counter
    start = clock()
    loss = COMPUTATIONS[name](*arguments, rank.group)
    device.synchronize()
    middle = clock()
    loss.backward()
    device.synchronize()
    end = clock()
    gradients = arguments[0].nbytes + arguments[1].nbytes
    return Figures(middle - start, end - middle, (device.peak_memory_bytes() - held - gradients) / 1e6)


def largest_difference(size: Size, rank: Rank) -> float:
    """Largest error of megarl's gradients on this rank relative to the largest plain gradient."""
    parts, alone = inputs(size, rank), inputs(size, Rank())
    ours = torch.autograd.grad(megarl(*parts, rank.group), parts[:2])
    if rank.group is not None:
        dist.all_reduce(ours[0], group=rank.group)
    theirs = torch.autograd.grad(plain(*alone, None), alone[:2])
    of_hidden = (ours[0] - theirs[0]).abs().max() / theirs[0].abs().max()
    of_weight = (ours[1] - rank.part(theirs[1])).abs().max() / theirs[1].abs().max()
    return float(max(of_hidden, of_weight))


def on_ranks(what: str, size: Size, ranks: int) -> list[str]:
    """Output of this program with `--only what`, run in `ranks` processes at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--only", what, f"--ranks={ranks}", f"--store={folder}/store"]
        command += [f"--{key}={value}" for key, value in asdict(size).items()]
        processes = [
            subprocess.Popen([*command, f"--rank={rank}"], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
        ]
        printed = [process.communicate()[0] for process in processes]
        for process in processes:
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)
    return printed


def measure_apart(name: str, size: Size, ranks: int) -> Figures:
    """Measure in new processes; the maximum over all ranks."""
    of_ranks = [Figures(**json.loads(text)) for text in on_ranks(name, size, ranks)]
    return Figures(*(max(getattr(each, field) for each in of_ranks) for field in Figures.__dataclass_fields__))


def table(rows: Sequence[tuple[str, Size, int]]) -> list[str]:
    """Measure computations, and return a Markdown table with their sizes and ranks."""
    unit = "s" if device.device().type == "cuda" else "CPU s"
    lines = [
        "| computation | ranks | tokens | vocabulary | hidden | type |"
        f" forward, {unit} | backward, {unit} | memory, MB |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for name, size, ranks in rows:
        found = measure_apart(name, size, ranks)
        lines.append(
            f"| {name} | {ranks} | {size.tokens:,} | {size.vocabulary:,} | {size.hidden:,} | {size.dtype}"
            f" | {found.forward_s:.2f} | {found.backward_s:.2f} | {found.memory_mb:,.0f} |"
        )
    return lines


def report(whole: Size, small: Size, of_ranks: Sequence[int], command: str) -> str:
    """The page."""
    on_gpu = device.device().type == "cuda"
    rows = [("megarl", size, ranks) for size in (whole, small) for ranks in of_ranks] + [("plain", small, 1)]
    with_liger = on_gpu and importlib.util.find_spec("liger_kernel") is not None
    if with_liger:
        rows += [("Liger", whole, 1), ("Liger", small, 1)]
    missing = "" if with_liger else "\n\nLiger's kernels need a GPU and are absent here."
    machine = describe(ROOT)
    figures = "\n".join(table(rows))
    differences = ", ".join(
        f"{max(map(float, on_ranks('difference', small, ranks))):.1e} on {ranks} rank(s)" for ranks in of_ranks
    )
    return (
        f"# Log-probabilities and entropy from hidden states on a {'GPU' if on_gpu else 'CPU'}\n\n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"Machine: {machine}; {torch.get_num_threads()} thread(s) in each process\n\n"
        f"Versions: torch {torch.__version__}\n\nCommand: `{command}`\n\n"
        "Where several ranks each have a part of the vocabulary, seconds and memory are those of the rank with most of"
        f" them.\n\n{figures}{missing}\n\nLargest difference of a gradient from the plain computation on one rank, at"
        f" {small.tokens:,} tokens, relative to the largest element: {differences}\n"
    )


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=at_least_one, default=32768)
    parser.add_argument("--vocabulary", type=at_least_one, default=129280)
    parser.add_argument("--hidden", type=at_least_one, default=256)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--plain-tokens", type=at_least_one, default=1024, help="where all logits fit into memory")
    parser.add_argument(
        "--ranks",
        type=at_least_one,
        nargs="+",
        default=[1, 2] if device.device().type == "cpu" else [1],
        help="processes over which the vocabulary is cut, one table row for each; on GPUs each needs its own",
    )
    parser.add_argument("--write", type=Path, help="the page is written here, too")
    parser.add_argument(
        "--only", choices=[*COMPUTATIONS, "difference"], help="one figure of --tokens, in this process; JSON"
    )
    parser.add_argument("--rank", type=int, default=0, help="of this process, with --only")
    parser.add_argument("--store", type=Path, help="a new file at which the ranks meet, with --only")
    found = parser.parse_args()
    if any(found.vocabulary % ranks for ranks in found.ranks):
        parser.error(f"--vocabulary {found.vocabulary} does not divide by every one of --ranks")
    return found


def main() -> None:
    """See the module."""
    asked = options()
    whole = Size(asked.tokens, asked.vocabulary, asked.hidden, asked.dtype)
    if asked.only:
        rank = Rank.joined(asked.rank, asked.ranks[0], asked.store)
        if asked.only == "difference":
            print(largest_difference(whole, rank))
        else:
            print(json.dumps(asdict(measure(asked.only, whole, rank))))
        if rank.group is not None:
            dist.destroy_process_group()
        return
    small = Size(asked.plain_tokens, asked.vocabulary, asked.hidden, asked.dtype)
    page = report(
        whole, small, asked.ranks, ".venv/bin/python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    )
    print(page)
    if asked.write:
        asked.write.write_text(page)


if __name__ == "__main__":
    main()
