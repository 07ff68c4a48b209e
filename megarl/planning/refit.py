"""A refit to plan: a model on a trainer's ranks, and the engines that receive it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from converters.architectures import Architecture, read_architecture, without_mtp
from converters.cost import Traffic, formats, traffic
from converters.errors import UserError, names_as_given
from converters.formats.safetensors import read_json
from converters.layout import Layout
from converters.layouts.engine import engine_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.number_formats import NumberFormat
from converters.number_formats.number_format import WHOLE_ROW
from converters.plan import Plan
from megarl.config.folder import model_config_file
from megarl.config.trained_model import read_trained_config
from megarl.planning.amounts import say_count
from megarl.planning.cluster import Cluster

_OF_A_LOADER = "which reads all tensors out of the memory of one machine, whose rate is not known here"
"""Why refits through a loader are not planned."""


@dataclass(frozen=True)
class PlannedRefit:
    """A refit of `replicas` equal engines with the parallel sizes `engine`.

    Engines cut the model as vLLM and SGLang do. This equals Megatron's cut at the same sizes without pipeline
    parallelism, except for the vocabulary and for key-value heads that are fewer than ranks.
    """

    architecture: Architecture
    engine_architecture: Architecture
    trainer: ParallelSizes
    engine: ParallelSizes
    replicas: int
    number_format: NumberFormat | None
    """The number format of the engines' matrices; None for bf16."""
    cluster: Cluster
    colocated: bool = False
    bucket_bytes: int = 512 * 10**6
    buckets: int = 2
    """Number of buckets per rank."""
    node_once: bool = True
    """Whether data that several ranks of a node need enters the node once and is relayed over NVLink."""

    def __post_init__(self) -> None:
        for name in ("replicas", "bucket_bytes", "buckets"):
            if getattr(self, name) < 1:
                raise UserError(f"the refit's {name} is {getattr(self, name)}; it must be at least 1")
        if self.number_format and self.number_format.pack_passes is None:
            raise UserError(
                f"engine_dtype {self.engine_dtype} is made by the engines' own loader, {_OF_A_LOADER}: plan with"
                " another"
            )
        ranks = max(self.engine.tensor_model_parallel_size, self.engine.expert_tensor_size)
        if self.number_format and self.number_format.block[1] == WHOLE_ROW and ranks > 1:
            raise UserError(
                f"engine_dtype {self.engine_dtype} has a scale for each row, and an engine that cuts rows over"
                f" {ranks} ranks is given whole ones by its own loader, {_OF_A_LOADER}: plan with engine_tp 1, and"
                " engine_ep for experts"
            )

    @property
    def engine_dtype(self) -> str:
        """Name of the number format of the engines' matrices; "bf16" without one."""
        return self.number_format.name if self.number_format else "bf16"

    @property
    def destinations(self) -> int:
        """Number of ranks of all engines."""
        return self.replicas * self.engine.world_size

    def check_served(self) -> None:
        """Raise UserError for engines that no run can have, although their refit could be planned.

        These are engines with attention data parallelism across machines, and cuts through blocks of the number format.
        """
        engine, node = self.engine, self.cluster.gpus_per_node
        attention = engine.tensor_model_parallel_size
        if engine.world_size > max(attention, node):
            raise UserError(
                f"an engine has all of attention on each {say_count(attention, 'GPU')}, and then all of its GPUs on one"
                f" machine, of which a machine has {node}: give engine_tp {engine.world_size}, or engine_ep {node}"
            )
        if self.number_format:
            self.number_format.check(self.engine_architecture, attention, engine.expert_tensor_size)

    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of the trainer and of one engine. Raises UserError if the model cannot be cut like this."""
        return (
            _layout("trainer", lambda: megatron_layout(self.architecture, self.trainer, module_names="local"), {}),
            _layout("engines", lambda: engine_layout(self.engine_architecture, self.engine), _NAMES_OF_ENGINES),
        )

    def traffic(self, dtype: torch.dtype = torch.bfloat16) -> Traffic:
        """Bytes from rank to rank if the trained model has dtype `dtype`. Raises UserError as `layouts` does."""
        source, destination = self.layouts()
        topology = self.cluster.topology(source.ranks, self.destinations, colocated=self.colocated)
        plan = Plan(source, destination, self.replicas, topology, node_once=self.node_once)
        return traffic(plan, formats(self.architecture, number_format=self.number_format, dtype=dtype))


_NAMES_OF_ENGINES = {
    **dict.fromkeys(("tensor_model_parallel_size", "expert_tensor_parallel_size"), "engine_tp"),
    "expert_model_parallel_size": "engine_ep",
}
"""Field of an engine's `ParallelSizes` -> its name in messages, to distinguish it from the trainer's."""


def _layout(whose: str, make: Callable[[], Layout], names: Mapping[str, str]) -> Layout:
    try:
        with names_as_given(names):
            return make()
    except UserError as error:
        raise UserError(f"for the {whose}, {error}") from error


def engine_sizes(tensor: int, expert: int | None) -> ParallelSizes:
    """The sizes of one engine: attention cut over `tensor` ranks, whole experts distributed over `expert` ranks.

    Without `expert`, experts are cut over the `tensor` ranks, too. If `expert` is larger than `tensor`, attention is
    data-parallel over groups of `tensor` ranks. Raises UserError, which names the sizes engine_tp and engine_ep, if the
    expert ranks do not consist of such groups.
    """
    for name, size in (("engine_tp", tensor), ("engine_ep", expert)):
        if size is not None and size < 1:
            raise UserError(f"an engine of {name} {size} has no ranks; give at least 1")
    if expert is None:
        return ParallelSizes(world_size=tensor, tensor_model_parallel_size=tensor)
    if expert % tensor:
        raise UserError(
            f"engine_ep {expert} is no multiple of engine_tp {tensor}; experts are shared out to all ranks of an"
            " engine, which are groups of engine_tp"
        )
    return ParallelSizes(
        world_size=expert,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )


def read_trained_model(place: str, prediction_layers: int | None) -> Architecture:
    """Read a model as `read_model` does, with `prediction_layers` multi-token-prediction layers; None keeps its own."""
    return read_architecture(read_trained_config(place, "the model", prediction_layers))


def read_model(place: str, name: str = "the model") -> Architecture:
    """Read the model of a config.json, a folder with one, or a name in configs/models, as far as a refit moves it.

    Multi-token-prediction layers stay in the trainer. Raises UserError, which calls the model `name`, if there is none,
    and for a config.json of an unknown architecture.
    """
    return read_architecture(without_mtp(read_json(model_config_file(place, name))))
