"""The direct path: every shard goes from a rank that holds it straight into the engine's parameter."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from converters.architectures import Architecture
from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace, PackedTrace, untraced
from converters.topology import Topology
from megarl.cluster.engines.engines import REFIT_LIMIT, Engines
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.calls import wait, wait_together
from megarl.cluster.workers.worker import Call, WorkerFailed
from megarl.refit.path import Receivers
from megarl.refit.transport_choice import Route
from megarl.resharding.direct.abort import abort_rendezvous
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.quantised_shard import CutBlocksError, Quantisation
from megarl.resharding.direct.transfer_spec import TransferSpec, check_traces, held_dtypes
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.transfer_stats import TransferStats
from megarl.rollout.protocol import Engine
from megarl.schema import RefitConfig

_NOTABLE_BYTES = 10**9
"""Staging memory on a GPU from which on the user is told about it."""


class NoDirectPathError(Exception):
    """The engines can take weights through their own loader only; the message says why."""


class DirectPath:
    """Moves weights from the trainer's ranks straight to the workers of engines that are all alike.

    Raises NoDirectPathError if an engine cannot say where it keeps every tensor, and UserError if engine and policy are
    not the same model.
    """

    is_direct = True

    def __init__(
        self, trainer: TrainerGroup, engines: Engines, architecture: Architecture, config: RefitConfig
    ) -> None:
        self._trainer = trainer
        self._all_engines = engines
        self._receivers = Receivers.of(engines)
        self._config = config
        dtypes = trainer.weights.dtypes()
        quantisation = _quantisation(engines, architecture, dtypes)
        self._trace = partial(
            _traces,
            architecture=architecture,
            policy_dtypes=dtypes,
            quantisation=quantisation,
            timeout_s=config.timeout_s,
        )
        self._traced = engines.workers()
        traces = self._trace(engines)
        self._trainer_nodes = trainer.nodes()
        topology = topology_of(self._trainer_nodes, engines.worker_nodes())
        self._route = Route.between(trainer, engines, topology, config)
        self._spec = TransferSpec(
            architecture,
            trainer.parallel,
            trainer.module_names,
            traces,
            len(engines),
            topology,
            config.bucket_bytes,
            quantisation,
        )
        try:
            self._spec.check(dtypes)
        except CutBlocksError as error:
            raise NoDirectPathError(str(error)) from error

    def set_engines(self, engines: Engines) -> None:
        """See `WeightPath.set_engines`. New engines are asked where they keep their weights, as the first ones were.

        An engine is traced only once, even if the path leaves it out for a while: tracing blocks all its other work.
        """
        if self._receivers.matches(engines):
            return
        new = engines.excluding(self._traced)
        # Read before the trace: an engine that restarts during it has another worker, and is traced again.
        workers = new.workers()
        if len(new) and self._trace(new) != self._spec.traces:
            raise RuntimeError("an engine that was restarted keeps its weights elsewhere than before")
        self._traced += workers
        topology = topology_of(self._trainer_nodes, engines.worker_nodes())
        self._spec = replace(self._spec, replicas=len(engines), topology=topology)
        self._receivers = Receivers.of(engines)

    @property
    def description(self) -> str:
        """The path, its transports and their restrictions, and staging memory if it is notable."""
        staged = staging_note(self._spec.staged_bytes(0))
        return f"direct, through {self._route.description(self._spec.topology)}{staged}"

    def connect(self) -> None:
        """Connect all ranks with the workers that they send to; first close earlier connections of all engines."""
        weights, engines = self._trainer.weights, self._receivers.engines
        spec, route, timeout_s = self._spec, self._route, self._config.timeout_s
        self._disconnect()
        relay_listeners = engines.open_transfer(spec, timeout_s)
        listeners = weights.open_transfer(spec)
        rendezvous = Rendezvous(
            route.transport,
            secrets.token_bytes(32),
            listeners,
            weights.open_store(timeout_s) if TRANSPORTS[route.transport].needs_store else None,
            len(engines) * len(spec.traces),
            timeout_s,
            relay_listeners,
            topology=spec.topology if route.within else None,
            with_checksum=self._config.verify == "checksum" or self._config.delta,
            with_changes=self._config.delta,
            by_hardware=route.rdma.by_hardware,
        )
        connecting = [*weights.begin_connect(rendezvous), *engines.begin_connect(rendezvous)]
        # Until ranks are connected they cannot see a peer die, so the rendezvous is aborted for them.
        wait_together(connecting, TransferError, lambda failure: abort_rendezvous(rendezvous, _news(failure)))
        self._receivers = replace(self._receivers, are_connected=True)

    def confirm(self, version: int) -> None:
        """Connect, and compare the engines' parameters, which hold `version`, with what `send` would write.

        Raises NoDirectPathError if they differ: the engines then keep a tensor in another form than it was loaded in.
        """
        self.connect()
        comparing = self._receivers.engines.begin_compare(version)
        self._send(version, comparing)
        if differing := set().union(*chain.from_iterable(wait(comparing))):
            self.close()
            raise NoDirectPathError(f"the engine does not keep {min(differing)} as it was loaded")

    def send(self, version: int) -> TransferStats:
        """See `WeightPath.send`."""
        if not self._receivers.are_connected:
            self.connect()
        return self._send(version, self._receivers.engines.begin(Engine.receive, version))

    def recover(self, failure: WorkerFailed) -> None:
        """See `WeightPath.recover`: only a failed transfer (TransferError) is worth repeating; it connects anew."""
        if not isinstance(failure.error, TransferError):
            raise failure
        self._receivers = replace(self._receivers, are_connected=False)

    def next_path(self, version: int) -> "DirectPath":  # noqa: ARG002
        """See `WeightPath.next_path`."""
        return self

    def close(self) -> None:
        """Free the buckets, until the next `connect`."""
        self._receivers = replace(self._receivers, are_connected=False)
        try:
            self._disconnect()
            self._receivers.engines.close_transfer(self._config.timeout_s)
        finally:
            self._trainer.weights.close_transfer()

    def _disconnect(self) -> None:
        """Make all engines unmap their peers' memory before anyone frees it, as CUDA requires.

        All engines, not only those of this path: the others are serving, and still map memory of earlier transfers.
        """
        self._all_engines.disconnect_transfer(self._config.timeout_s)

    def _send(self, version: int, receiving: Sequence[Call[Any]]) -> TransferStats:
        sending = self._trainer.weights.begin_send(version)
        self._wait(sending, receiving)
        return sum(wait(sending), start=TransferStats())

    def _wait(self, of_trainer: Sequence[Call[Any]], of_engines: Sequence[Call[Any]]) -> None:
        # The ranks finish once everything is acknowledged; what an engine does afterwards does not involve them.
        timeout_s = self._config.timeout_s
        calls = [*of_trainer, *of_engines]
        wait_together(calls, TransferError, last=of_engines, timeout_s=timeout_s, key=REFIT_LIMIT)


def _news(failure: Exception) -> str:
    return failure.happened if isinstance(failure, WorkerFailed) else str(failure)


def staging_note(size_bytes: int) -> str:
    """The end of a sentence about the memory that a worker needs to stage split blocks; empty if it is little."""
    if size_bytes < _NOTABLE_BYTES:
        return ""
    return (
        f"; cuts of the trainer go through blocks, whose values take {size_bytes / 1e9:.2g} GB of an engine's worker."
        " Cut over fewer ranks to take less; experts are cut over megatron.expert_tensor_parallel_size"
    )


def _quantisation(
    engines: Engines, architecture: Architecture, dtypes: Mapping[str, torch.dtype]
) -> Quantisation | None:
    if engines.number_format is None:
        return None
    if engines.number_format.elements_per_code > 1:
        raise NoDirectPathError(f"engines take {engines.number_format.title} through their own loader only")
    (values,) = {dtypes[name] for name in engines.number_format.quantised_names(architecture)}
    return Quantisation(engines.number_format, values)


def _traces(
    engines: Engines,
    architecture: Architecture,
    policy_dtypes: Mapping[str, torch.dtype],
    quantisation: Quantisation | None,
    timeout_s: float,
) -> list[LoadTrace]:
    """The load traces of one engine's workers.

    Raises NoDirectPathError if the engines differ, or a tensor has no trace.
    """
    shapes: Mapping[str, Shape] = architecture.hf_shapes
    if quantisation is not None:
        shapes = quantisation.number_format.checkpoint(architecture)[0]
    dtypes = held_dtypes(architecture, policy_dtypes, quantisation)
    try:
        # Unpack equal traces once: for DeepSeek-V3, all traces of 8 engines with 32 workers each take 105 seconds.
        first, *others = dict.fromkeys(map(tuple, engines.trace_layouts(shapes, dtypes, timeout_s)))
    except UserError as error:
        raise NoDirectPathError(str(error)) from error
    traces = _unpacked(first)
    # Checked before refusing the direct path: a UserError here holds for the loader path, too.
    check_traces(traces, dtypes)
    if any(_unpacked(other) != traces for other in others):
        raise NoDirectPathError("the engines do not keep their weights alike")
    for name, reason in untraced(traces).items():
        raise NoDirectPathError(f"{name} cannot be written in place: {reason}")
    return traces


def _unpacked(traces: Sequence[PackedTrace]) -> list[LoadTrace]:
    return [trace.unpacked() for trace in traces]


def topology_of(trainer_nodes: Sequence[str], worker_nodes: Sequence[str]) -> Topology:
    """The topology in which every rank and every engine worker has a GPU of its own, on its process's node."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys([*trainer_nodes, *worker_nodes]))}
    return Topology(
        [numbers[node] for node in trainer_nodes],
        range(len(trainer_nodes)),
        [numbers[node] for node in worker_nodes],
        range(len(trainer_nodes), len(trainer_nodes) + len(worker_nodes)),
    )
