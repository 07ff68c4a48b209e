"""Chooses a path by what the configuration asks for, and by what engines and machines allow."""

import torch

from converters.architectures import Architecture
from converters.errors import UserError
from converters.number_formats import NumberFormat
from megarl.cluster.engines.engines import Engines
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.refit.direct import DirectPath, NoDirectPathError
from megarl.refit.loader import LoaderPath
from megarl.resharding.direct.transports import MAPPED_MEMORY_TRANSPORT
from megarl.resharding.loader.buckets import cut_into_buckets
from megarl.schema import RefitConfig


def check_machines(machines: int, config: RefitConfig, *, has_gpus: bool) -> None:
    """Raise UserError if `config` asks for a path that does not work on this many machines, or without GPUs."""
    if config.transport == MAPPED_MEMORY_TRANSPORT["nccl"] and not has_gpus:
        raise UserError(
            f"refit.transport={config.transport} is memory of GPUs, and the trainer's ranks have none: set it to auto"
        )
    if machines == 1:
        return
    apart = f"and the trainer and the engines run on {machines} machines"
    if config.path == "loader":
        raise UserError(f"refit.path=loader goes through the memory of one machine, {apart}: set it to auto")
    if config.transport in MAPPED_MEMORY_TRANSPORT.values():
        raise UserError(
            f"refit.transport={config.transport} is memory of one machine, {apart}: set it to auto, rdma or tcp"
        )


def check_buckets(
    architecture: Architecture, params_dtype: torch.dtype, held_in: NumberFormat | None, config: RefitConfig
) -> None:
    """Raise UserError for a tensor larger than a bucket: on one machine the first weights go through buckets whole.

    `held_in` is the number format of the engines, if they have one.
    """
    quantised = held_in.quantised_names(architecture) if held_in else ()
    whole = {name: shape for name, shape in architecture.hf_shapes.items() if name not in quantised}
    cut_into_buckets(whole, architecture.hf_dtypes(params_dtype), config.bucket_bytes)


def loader_path(trainer: TrainerGroup, engines: Engines, architecture: Architecture, config: RefitConfig) -> LoaderPath:
    """The path that brings engines on one machine their first weights.

    It hands over to the direct path if the engines can say where they keep every tensor, and the configuration permits
    it. Raises UserError if engine and policy are not the same model, or if the configuration allows only the direct
    path and the engines do not support it.
    """
    candidate, refusal = None, ""
    try:
        candidate = DirectPath(trainer, engines, architecture, config)
    except NoDirectPathError as error:
        refusal = str(error)
    if config.path == "loader":
        candidate = None
    return LoaderPath(trainer, engines, architecture, config, candidate=candidate, refusal=refusal)


def adapter_path(trainer: TrainerGroup, engines: Engines, adapter: Architecture, config: RefitConfig) -> LoaderPath:
    """The path of an adapter into a slot of engines on one machine that have loaded the base weights."""
    return LoaderPath(trainer, engines, adapter, config, refusal="the adapter goes alone, into a slot")


def direct_path(trainer: TrainerGroup, engines: Engines, architecture: Architecture, config: RefitConfig) -> DirectPath:
    """The path to engines that have loaded the ranks' present weights as version 0; compares both.

    Raises UserError if engine and policy differ in model or weights, or if an engine keeps a tensor in another form.
    """
    try:
        path = DirectPath(trainer, engines, architecture, config)
        path.confirm(version=0)
    except NoDirectPathError as error:
        raise UserError(
            f"{error}, so that weights cannot go straight into it, which is the only way between machines: keep trainer"
            " and engines on one, give rollout.engine_args another kernel, or, if there is a"
            " model.megatron_checkpoint, give model.path its weights"
        ) from error
    return path
