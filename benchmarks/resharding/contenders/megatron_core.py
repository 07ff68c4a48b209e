"""`megatron.core.resharding` of megatron-core 0.16.1, over gloo, between two Megatron layouts.

It reads names, shapes and a few attributes of parameters and layers, so the modules here contain nothing else.
Parameters have Transformer Engine's names, the only ones that it supports for experts; Transformer Engine itself does
not run on a CPU.
"""

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from converters.architectures import Architecture, Kind, Parameter
from converters.layouts.parallel_sizes import ParallelSizes
from megatron_ext import device
from resharding.party import Party

_LAYER = re.compile(r"decoder\.layers\.(\d+)$")


class MegatronCore:
    """Reshards into the worker's Megatron tensors."""

    def __init__(self, party: Party) -> None:
        reshard, get_service = _megatron()
        groups = _Groups(party)
        architecture = party.scenario.architecture
        written = {} if party.is_source else party.written["megatron"]
        self._party = party
        self._models = (
            _model(architecture, party.scenario.trainer_sizes, party.number, party.tensors, groups.of_trainer),
            _model(architecture, party.scenario.engine_sizes, party.number, written, groups.of_engine),
        )
        self._reshard, self._service = reshard, get_service("gloo")
        self.run()
        plan = self._models[1]._cached_reshard_plan
        tensors = dict(self._models[0].named_parameters())
        self.moved_bytes = sum(tensors[each.param_name][each.my_slice].nbytes for each in plan.send_ops)

    def run(self) -> None:
        """Send and receive. The plan is made only in the first run."""
        self._reshard(*self._models, service=self._service)

    def wipe(self) -> None:
        """Overwrite what was written."""
        self._party.wipe("megatron")

    def wrong(self) -> list[str]:
        """Names of tensors with a wrong value."""
        return self._party.wrong("megatron")


def prepare() -> None:
    """Import Megatron, which takes seconds and memory, before anything is measured."""
    _megatron()


def _megatron() -> tuple[Callable[..., None], Callable[..., Any]]:
    device.install()
    from megatron.core.resharding import get_or_create_service, reshard_model_weights

    return reshard_model_weights, get_or_create_service


class _Groups:
    """The process groups of a rank's parameters, on either side."""

    def __init__(self, party: Party) -> None:
        self.of_trainer = _collection(party.scenario.trainer_sizes, 0, party.place.rank)
        self.of_engine = _collection(party.scenario.engine_sizes, party.sources, party.place.rank)


def _collection(parallel: ParallelSizes, first: int, own_rank: int) -> SimpleNamespace:
    """Groups of `parallel`'s ranks, which begin at rank `first`; every process creates all of them."""
    at = {first + rank: parallel.coordinates(rank) for rank in range(parallel.world_size)}
    # Two ranks are in the same group of a kind if they differ only in that coordinate.
    fixed = {
        "tp": lambda rank: (at[rank].pipeline, (rank - first) // parallel.tensor_model_parallel_size),
        "expt_tp": lambda rank: (at[rank].pipeline, (rank - first) // parallel.expert_tensor_size),
        "ep": lambda rank: (at[rank].pipeline, at[rank].expert_tensor),
        "dp": lambda rank: (at[rank].pipeline, at[rank].tensor),
        "pp": lambda rank: (at[rank].tensor, at[rank].expert),
    }
    # A rank outside has no parameters on this side, but needs a data-parallel group.
    found = SimpleNamespace(dp=dist.group.WORLD)
    for kind, key in fixed.items():
        members: dict[Any, list[int]] = {}
        for rank in at:
            members.setdefault(key(rank), []).append(rank)
        for ranks in members.values():
            group = dist.new_group(ranks)
            if own_rank in ranks:
                setattr(found, kind, group)
    return found


class _Model(nn.Module):
    def __init__(self, architecture: Architecture, groups: SimpleNamespace) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=architecture.num_experts)
        self.pg_collection = groups
        self._cached_reshard_plan: Any = None


def _model(
    architecture: Architecture,
    parallel: ParallelSizes,
    rank: int,
    tensors: Mapping[str, Tensor],
    groups: SimpleNamespace,
) -> "_Model":
    model = _Model(architecture, groups)
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module: nn.Module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        parameter = nn.Parameter(tensor, requires_grad=False)
        _mark(parameter, _parameter(architecture, name), parallel)
        module.register_parameter(last, parameter)
    if tensors:
        layers = parallel.layers(architecture.num_layers, parallel.coordinates(rank).pipeline, 0)
        for name, module in model.named_modules():
            if found := _LAYER.match(name):
                setattr(module, "layer_number", layers[int(found[1])] + 1)  # noqa: B010 - not a parameter
    return model


def _mark(parameter: nn.Parameter, kind: Parameter, parallel: ParallelSizes) -> None:
    """Set the attributes that Megatron's layers set on their parameters."""
    marks = {
        "tensor_model_parallel": kind.kind is not Kind.REPLICATED,
        "partition_dim": 1 if kind.kind is Kind.ROW else 0,
        "partition_stride": 2 if kind.kind is Kind.GATED else 1,
        "allreduce": not (kind.is_expert and parallel.expert_model_parallel_size > 1),
    }
    for name, value in marks.items():
        setattr(parameter, name, value)


def _parameter(architecture: Architecture, name: str) -> Parameter:
    """The entry of the weight map for a local tensor."""
    return next(
        parameter
        for parameter in architecture.weight_map
        if _pattern(parameter.transformer_engine or parameter.megatron).fullmatch(name)
    )


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(layer|expert)\\}", r"\\d+", re.escape(template)))
