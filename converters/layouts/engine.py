"""The layout of a model on an engine's workers, computed for plans, where no engine can be asked."""

from converters.architectures import Architecture
from converters.layout import Layout
from converters.layouts.cuts import ENGINES
from converters.layouts.megatron import cut_layout
from converters.layouts.parallel_sizes import ParallelSizes


def engine_layout(architecture: Architecture, parallel: ParallelSizes) -> Layout:
    """The layout on the workers of a vLLM or SGLang engine without pipeline parallelism.

    Tensors are laid out as on Megatron's ranks, except for the vocabulary and for key-value heads, which workers
    replicate if there are fewer heads than workers. The names and the stacking of the workers' own tensors differ.

    Raises UserError as `megatron_layout` does.
    """
    return cut_layout(architecture, parallel, "local", ENGINES)
