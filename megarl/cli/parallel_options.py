"""The options for Megatron's parallel sizes, shared by all commands that take them."""

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from converters.layouts.parallel_sizes import ParallelSizes


class Size(NamedTuple):
    """A parallel size, and the option that gives it."""

    options: tuple[str, ...]
    """Names of the option; the second is Megatron-LM's."""
    field: str
    """The field of `ParallelSizes`, whose error messages name it."""
    default: int | None
    help: str

    @property
    def name(self) -> str:
        """The attribute of the parsed options."""
        return self.options[0].lstrip("-").replace("-", "_")


SIZES = (
    Size(("--tp", "--tensor-model-parallel-size"), "tensor_model_parallel_size", 1, "tensor-parallel size"),
    Size(("--pp", "--pipeline-model-parallel-size"), "pipeline_model_parallel_size", 1, "pipeline-parallel size"),
    Size(
        ("--vpp", "--num-virtual-stages-per-pipeline-rank"),
        "virtual_pipeline_model_parallel_size",
        None,
        "virtual stages of each pipeline stage",
    ),
    Size(("--cp", "--context-parallel-size"), "context_parallel_size", 1, "context-parallel size"),
    Size(("--ep", "--expert-model-parallel-size"), "expert_model_parallel_size", 1, "expert-parallel size"),
    Size(
        ("--etp", "--expert-tensor-parallel-size"),
        "expert_tensor_parallel_size",
        None,
        "tensor-parallel size of the experts (default: --tp)",
    ),
    Size(
        ("--decoder-first-pipeline-num-layers",),
        "num_layers_in_first_pipeline_stage",
        None,
        "layers of the first pipeline stage, where it has its own number",
    ),
    Size(
        ("--decoder-last-pipeline-num-layers",),
        "num_layers_in_last_pipeline_stage",
        None,
        "layers of the last pipeline stage, where it has its own number",
    ),
)
OPTION_OF_SIZE: Mapping[str, str] = {size.field: size.options[0] for size in SIZES}
"""Field of `ParallelSizes` -> the option that sets it."""


def add_parallel_sizes(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options."""
    for size in SIZES:
        parser.add_argument(*size.options, type=int, default=size.default, metavar="N", help=size.help)


def parallel_sizes(options: argparse.Namespace, ranks: int | None = None) -> "ParallelSizes":
    """The sizes on `ranks` ranks, by default the fewest possible. Raises UserError for impossible sizes."""
    from converters.layouts.parallel_sizes import ParallelSizes

    if ranks is None:
        # Treat sizes below 1 as 1 here, so that the error is about the size and not the number of ranks.
        tp, pp, cp, ep = (max(1, size) for size in (options.tp, options.pp, options.cp, options.ep))
        etp = max(1, tp if options.etp is None else options.etp)
        ranks = pp * math.lcm(tp * cp, ep * etp)
    return ParallelSizes(world_size=ranks, **{size.field: getattr(options, size.name) for size in SIZES})
