"""Builds the Markdown page of `convert.py`'s results."""

import io
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from rich.console import Console

from conversion.observe import Observation
from conversion.rounds import Run
from conversion.tables import summarise, table

_MB = 1e6
_CONVERT, _EXPORT = "megarl convert, bf16 to Megatron", "megarl export, Megatron to bf16"
_SLOWER_THAN_OURS = (
    ("mbridge load, bf16 to a model", f"{_CONVERT}, 1 worker"),
    ("mbridge export, a model to bf16", f"{_EXPORT}, 1 worker"),
    ("mbridge load, FP8 to a model", "megarl convert, FP8 to Megatron, 1 worker"),
    ("megatron-bridge load, bf16 to a model", f"{_CONVERT}, 1 worker"),
    ("megatron-bridge export, a model to bf16", f"{_EXPORT}, 1 worker"),
)
_SCALING = (
    ("raw write + sync", "process", "processes"),
    ("cp + sync", "process", "processes"),
    (_CONVERT, "worker", "workers"),
    (_EXPORT, "worker", "workers"),
)
_NOTES = """\
## What is compared

- The checkpoints are DeepSeek-V3 made small, with 8 experts and a layer of multi-token prediction: random values in
  bf16, or the same in block FP8. Sizes are those of the bf16 form. The shape "shallow" is 1,024 wide with experts of
  704 and as many layers as the size allows; its tensors have about 2 MB in the mean, where those of Qwen3-30B-A3B have
  3 and those of DeepSeek-V3 15. "narrow" has all 61 layers at any size, in 2,287 tensors: what a tensor costs whatever
  its size shows there.
- The peers are measured on "narrow": with multi-token prediction mbridge takes no other number of layers than 61.
- An export writes files of an eighth of its source, as many as the source of a conversion has.
- The programs take turns. Before each run its source is read once, so it is in the page cache; what was written
  before is on the disk, what the run wrote is deleted after it, and the machine idles for 5 seconds: memory that was
  just freed is quicker to get again, which would help a program that writes at once.
- `cp` copies the HuggingFace folder, then waits until its files are on the disk (`sync FILES`). "/ cp" is a speed
  divided by that of `cp` with one process in the same round, once of the bytes written and once of those read; the
  median.
- megarl's seconds are those that its last line gives, from the first look at the source to the last byte on the disk
  (`fsync`), without the start of Python; "whole command" has that too. It writes a checkpoint that
  `megatron.core.dist_checkpointing` loads in any layout, with checksums, or reads one.
- mbridge and megatron-bridge are the released packages, one process, TP = PP = EP = 1, on the CPU. Their `load`
  copies HuggingFace files into the parameters of a GPTModel in memory, and writes nothing; their `export` copies from
  the model into HuggingFace files, and does not wait for the disk. Imports and building the model are not in the
  seconds, only in "whole command". Transformer Engine's modules are replaced by ones with the same parameters,
  mbridge's reading to the GPU and its FP8 kernel by the same on the CPU; the loops are theirs. megatron-bridge leaves
  out multi-token prediction.
- mbridge's seconds of loading are of tensors, hardly of bytes: for each it makes a set of all names and asks the model
  for all of its tensors. So its share grows with the number of tensors and falls with their size.
- Memory is RssAnon and RssShmem of all processes together, sampled every 50 ms: what no file backs. The greatest of
  all runs.
"""


def sentences(runs: Sequence[Run], workers: Sequence[int]) -> Iterator[str]:
    """How the peers compare with us, and how everything scales: ratios of seconds per round."""
    seconds: dict[str, dict[int, float]] = {}
    for run in runs:
        for phase in run.phases:
            seconds.setdefault(phase.name.partition(" (")[0], {})[run.round] = phase.seconds
    pairs = [(slow, fast, f"{slow}: {{}} x the seconds of {fast}") for slow, fast in _SLOWER_THAN_OURS]
    for name, one, several in _SCALING:
        for number in workers[1:]:
            pairs.append(
                (f"{name}, 1 {one}", f"{name}, {number} {several}", f"{name}: {number} {several} {{}} x as fast")
            )
    for slow, fast, sentence in pairs:
        if slow in seconds and fast in seconds:
            ratios = [each / seconds[fast][number] for number, each in seconds[slow].items()]
            yield sentence.format(f"{median(ratios):.2f}") + f" ({min(ratios):.2f} to {max(ratios):.2f})."


def dry_run_sentence(seen: Sequence[Observation]) -> str:
    """The cost of planning the conversion of the whole model, as a sentence."""
    inside, command = median(each.last_line["seconds"] for each in seen), [each.seconds for each in seen]
    memory = max(each.peak_anonymous_bytes for each in seen)
    return (
        f"Dry run of the released 671B (TP 8, PP 16, EP 32): {inside:.1f} s, as a whole command {median(command):.1f} s"
        f" ({min(command):.1f} to {max(command):.1f}), {memory / _MB:,.0f} MB."
    )


def page(
    facts: Mapping[str, str],
    runs_of_size: Mapping[float, Sequence[Run]],
    dry_runs: Sequence[Observation],
    workers: Sequence[int],
) -> str:
    """The whole page; `facts` are lines such as date, machine and command."""
    parts = ["# Converting checkpoints on a CPU, beside `cp` and others\n"]
    parts += [f"{name}: {fact}\n" for name, fact in facts.items()]
    for size, runs in runs_of_size.items():
        parts += [f"## {size:g} GB\n", markdown(runs), *(f"- {each}" for each in sentences(runs, workers)), ""]
    if dry_runs:
        parts += ["## A dry run\n", dry_run_sentence(dry_runs), ""]
    return "\n".join([*parts, _NOTES])


def markdown(runs: Sequence[Run]) -> str:
    """The table of the runs as Markdown, as wide as needed, with right-aligned numbers."""
    text = io.StringIO()
    Console(file=text, width=400).print(table(summarise(runs)))
    header, rule, *rows = (line for line in text.getvalue().splitlines() if line.strip())
    return "\n".join([header, rule.replace("-|", ":|").replace(":|", "-|", 1), *rows]) + "\n"
