"""How much of the weights an RL step changes, and how many bytes of it a refit would have to move.

Runs real GRPO steps, of the quickstart's tiny model after its warm-up and of the pretrained model of 135 million
parameters. The weights after each step are compared bit by bit with those before it, as HuggingFace tensors in the
dtype that the engine receives. Adam's state starts at zero, so its first step moves every weight with a gradient by
about the whole learning rate.
"""

import argparse
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch
from machine import at_least_one, describe
from safetensors.torch import load_file
from torch import Tensor
from workload import Workload, prepare

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from converters.number_formats import FP8_BLOCK  # noqa: E402 (found by the line above)
from megarl.config.compose import compose  # noqa: E402
from megarl.resharding.alignment import ALIGNMENT_BYTES  # noqa: E402
from megarl.resharding.direct.changes import changes_of  # noqa: E402
from megarl.run.job import Job, open_job  # noqa: E402
from megarl.run.opening import RunSetup  # noqa: E402
from megarl.tracking.clock import Clock  # noqa: E402
from megarl.tracking.versions import versions  # noqa: E402
from megarl.train import train_step  # noqa: E402

_BF16 = ("model.dtype=bf16", "rollout.engine_args.dtype=bfloat16")
# Does not change the gradients.
_LITTLE_MEMORY = ("loop.max_tokens_per_micro_batch=512",)
_VERSIONS = ("python", "megarl", "torch", "megatron-core")
PIECES = {"pieces of 4 kB": 4096, "of 64 kB": 65_536, "messages of 16 MiB": 2**24}


@dataclass(frozen=True)
class Run:
    """A job, with its learning rate and the dtype of its parameters; optimizer state is always float32."""

    model: str
    dtype: str
    lr: float

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides on top of the workload's."""
        rate = (f"megatron.lr={self.lr}", "megatron.min_lr=0", "megatron.lr_decay_style=constant")
        return (*rate, *_LITTLE_MEMORY, *(_BF16 if self.dtype == "bf16" else ()))


TINY, REAL = "qwen3_moe", "smollm2_equal"
RUNS = (
    *(Run(TINY, dtype, lr) for dtype in ("fp32", "bf16") for lr in (4e-4, 1e-6)),
    *(Run(REAL, dtype, 1e-6) for dtype in ("fp32", "bf16")),
    Run(REAL, "bf16", 2e-5),
)


@dataclass(frozen=True)
class Change:
    """Differences between two versions, each as a share of the total."""

    elements: float
    pieces: Sequence[float]
    tensors: float
    delta: float
    """Size of the deflated difference."""


def measure(run: Run, workload: Workload, steps: int, folder: Path) -> dict[Run, list[Change]]:
    """The changes of each step; for the pretrained model in bf16 also those in a block-FP8 engine."""
    _, recipe, *overrides = workload.of_run(folder / "run", steps)
    config = compose(recipe, [*overrides, *run.overrides])
    with open_job(RunSetup.read(config, "train")) as job:
        job.refit(0)
        seen = [_weights(job)]
        for _ in range(steps):
            train_step(job, Clock())
            seen.append(_weights(job))
        names = FP8_BLOCK.quantised_names(job.model.architecture)
    found = {run: [_change(*pair) for pair in pairwise(seen)]}
    if (run.model, run.dtype) == (REAL, "bf16"):
        codes = [_in_blocks(weights, names) for weights in seen]
        found[replace(run, dtype="bf16, in block FP8")] = [_change(*pair) for pair in pairwise(codes)]
    return found


def _in_blocks(weights: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """The weights with codes and scales instead of the matrices `names`."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in names:
            found[name], found[FP8_BLOCK.scales_name(name)] = FP8_BLOCK.quantise(tensor)
        else:
            found[name] = tensor
    return found


def _weights(job: Job) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory(dir=job.config.output_dir) as folder:
        written = Path(folder) / "model"
        job.trainer.export(written, job.model.folder)
        return {name: tensor for file in sorted(written.glob("*.safetensors")) for name, tensor in _read(file)}


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in load_file(file).items():
        yield name, tensor.clone()


def _change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Change:
    elements = [(_units(after[name]) != _units(before[name])).view(-1) for name in before]
    changed, total = sum(int(each.sum()) for each in elements), sum(len(each) for each in elements)
    now, then = (_packed(list(weights.values())) for weights in (after, before))
    shares = [
        _share([not torch.equal(*pair) for pair in zip(now.split(size), then.split(size), strict=True)])
        for size in PIECES.values()
    ]
    tensors = _share([bool(each.any()) for each in elements])
    deflated, _ = changes_of(now, then)
    return Change(changed / total, shares, tensors, 1.0 if deflated is None else len(deflated) / len(now))


def _units(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """All bytes, one tensor after the other."""
    memory = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    return torch.cat([memory, memory.new_zeros(-len(memory) % ALIGNMENT_BYTES)])


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


def table(found: Mapping[Run, Sequence[Change]]) -> list[str]:
    """Lines of Markdown: the first and the last step of each run."""
    head = ["model", "parameters", "lr", "step", "elements that change", *PIECES, "tensors", "deflated difference"]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for run, changes in found.items():
        for step in sorted({1, len(changes)}):
            change = changes[step - 1]
            shares = [change.elements, *change.pieces, change.tensors, change.delta]
            cells = [run.model, run.dtype, f"{run.lr:g}", str(step), *(f"{100 * share:.1f} %" for share in shares)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and print; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=(TINY, REAL), nargs="+", default=(TINY, REAL), help="which to train")
    parser.add_argument("--steps", type=at_least_one, default=5, help="of each run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the page to FILE, in Markdown")
    options = parser.parse_args()
    ours = ", ".join(f"{name} {version}" for name, version in versions().items() if name in _VERSIONS)
    machine = describe(ROOT)
    found: dict[Run, list[Change]] = {}
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="megarl-benchmark-") as folder:
            workload = prepare(model, Path(folder))
            for number, run in enumerate(each for each in RUNS if each.model == model):
                measured = measure(run, workload, options.steps, Path(folder) / str(number))
                found |= measured
                for each, changes in measured.items():
                    print(each, *changes, sep="\n", flush=True)
    lines = [
        "# What a step changes in the weights\n",
        f"Date: {date.today()}\n",
        f"Machine: {machine}\n",
        f"Versions: {ours}\n",
        f"Command: `python {shlex.join(sys.argv)}`",
        *textwrap.dedent(__doc__ or "").split("\n", 1)[1].splitlines(),
        "",
        *table(found),
        "",
    ]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
