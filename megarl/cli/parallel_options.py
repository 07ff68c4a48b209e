"""The options that say how Megatron cuts a model, of every command that takes them."""

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from converters.layouts.parallel_sizes import ParallelSizes

_SIZES = (
    (("--tp", "--tensor-model-parallel-size"), 1, "tensor-parallel size"),
    (("--pp", "--pipeline-model-parallel-size"), 1, "pipeline-parallel size"),
    (("--vpp", "--num-virtual-stages-per-pipeline-rank"), None, "virtual stages of each pipeline stage"),
    (("--cp", "--context-parallel-size"), 1, "context-parallel size"),
    (("--ep", "--expert-model-parallel-size"), 1, "expert-parallel size"),
    (("--etp", "--expert-tensor-parallel-size"), None, "tensor-parallel size of the experts (default: --tp)"),
    (("--decoder-first-pipeline-num-layers",), None, "layers of the first pipeline stage, where it has its own number"),
    (("--decoder-last-pipeline-num-layers",), None, "layers of the last pipeline stage, where it has its own number"),
)
"""Names, the second of each Megatron-LM's; default; help."""

OPTION_OF_SIZE: Mapping[str, str] = {
    "tensor_model_parallel_size": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "virtual_pipeline_model_parallel_size": "--vpp",
    "context_parallel_size": "--cp",
    "expert_model_parallel_size": "--ep",
    "expert_tensor_parallel_size": "--etp",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
}
"""Field of `ParallelSizes`, by which its sentences name a size, and the option that gives it."""


def add_parallel_sizes(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options."""
    for names, default, text in _SIZES:
        parser.add_argument(*names, type=int, default=default, metavar="N", help=text)


def parallel_sizes(options: argparse.Namespace, ranks: int | None = None) -> "ParallelSizes":
    """The sizes on `ranks` ranks; without them on as few as they allow. Raises UserError for sizes that cannot be."""
    from converters.layouts.parallel_sizes import ParallelSizes

    if ranks is None:
        # A size below 1 is refused by its name, not by what it does to the number of ranks.
        tp, pp, cp, ep = (max(1, size) for size in (options.tp, options.pp, options.cp, options.ep))
        etp = max(1, tp if options.etp is None else options.etp)
        ranks = pp * math.lcm(tp * cp, ep * etp)
    return ParallelSizes(
        world_size=ranks,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp,
        context_parallel_size=options.cp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.etp,
        num_layers_in_first_pipeline_stage=options.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=options.decoder_last_pipeline_num_layers,
    )
