"""The layout of a model on the workers of an engine that cannot be asked: of a plan."""

from converters.architectures import Architecture
from converters.layout import Layout
from converters.layouts.cuts import ENGINES
from converters.layouts.megatron import cut_layout
from converters.layouts.parallel_sizes import ParallelSizes


def engine_layout(architecture: Architecture, parallel: ParallelSizes) -> Layout:
    """The layout on the workers of an engine of vLLM or SGLang, with sizes that have no pipeline.

    Tensors lie where Megatron's ranks have them, but for heads of keys and values, which workers have alike where there
    are fewer heads than workers, and for the vocabulary. Workers call and stack tensors in another way.
    Raises UserError as `megatron_layout`.
    """
    return cut_layout(architecture, parallel, "local", ENGINES)
