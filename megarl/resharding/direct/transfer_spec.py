"""The specification of a transfer: everything a rank needs to derive its part of every refit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from converters.architectures import Architecture
from converters.dtypes import dtype_name
from converters.errors import UserError
from converters.layout import Layout
from converters.layouts.megatron import ModuleNames, ParallelSizes, megatron_layout
from converters.layouts.traced_layout import LoadTrace, traced_layout
from converters.plan import Plan
from converters.topology import Topology
from megarl.resharding.alignment import ALIGNMENT_BYTES
from megarl.resharding.direct.messages_by_peer import DestinationMessages, MessagesByPeer, incoming, outgoing
from megarl.resharding.direct.quantised_shard import Quantisation, QuantisedShard
from megarl.resharding.direct.staging import staged_bytes


@dataclass(frozen=True)
class TransferSpec:
    """A transfer from a Megatron job to equal engines; small enough to send to every process.

    `traces` are the load traces of one engine's workers. `bucket_bytes` is half of the memory that a rank may use for
    buckets.

    Example: from 512 trainer ranks to `replicas=8` engines of 32 workers: 32 `traces`, and a `topology` of 512 and 256
    ranks, in place of a plan of millions of transfers.
    """

    architecture: Architecture
    parallel: ParallelSizes
    module_names: ModuleNames
    traces: Sequence[LoadTrace]
    replicas: int
    topology: Topology
    bucket_bytes: int
    quantisation: Quantisation | None = None
    """Present if the engines hold a number format; `traces` are then of a checkpoint in it."""

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the cached plan: each rank computes it in less time than it takes to send.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def plan(self) -> Plan:
        """The plan of a refit. Raises UserError if engine and policy are not the same model."""
        return Plan(
            source=megatron_layout(self.architecture, self.parallel, module_names=self.module_names),
            destination=self._destination,
            replicas=self.replicas,
            topology=self.topology,
            node_once=self.node_once,
        )

    @cached_property
    def quantised(self) -> list[QuantisedShard]:
        """The quantised tensors of each worker, if any. Raises CutBlocksError as `QuantisedShard`."""
        if self.quantisation is None:
            return []
        names = self.quantisation.number_format.quantised_names(self.architecture)
        shapes = self.architecture.hf_shapes
        return [QuantisedShard(trace.shard, self.quantisation, names, shapes) for trace in self.traces]

    @property
    def _destination(self) -> Layout:
        shards = [trace.shard for trace in self.traces]
        if self.quantisation is None:
            return traced_layout(shards, self.architecture.hf_shapes)
        # Check that the shards are complete, scales included. The plan itself moves only the policy's tensors; scales
        # travel with their codes.
        traced_layout(shards, self.quantisation.number_format.checkpoint(self.architecture)[0])
        without_scales = [shard.without_scales for shard in self.quantised]
        return Layout(len(shards), self.architecture.hf_shapes, without_scales.__getitem__)

    @property
    def node_once(self) -> bool:
        """Whether workers relay to their neighbours what would otherwise enter their node several times.

        False if all sources are on the engine's node.
        """
        source_nodes = set(self.topology.source_node)
        on_node = Counter(self.topology.destination_node)
        return any(ranks > 1 and source_nodes != {node} for node, ranks in on_node.items())

    def outgoing(self, source_rank: int) -> MessagesByPeer:
        """The messages of a source rank, by destination rank."""
        return outgoing(self.plan, source_rank, self._dtypes, self._message_bytes, self.quantised)

    def incoming(self, destination_rank: int) -> DestinationMessages:
        """The messages that a destination rank receives and relays."""
        return incoming(self.plan, destination_rank, self._dtypes, self._message_bytes, self.quantised)

    def staged_bytes(self, destination_rank: int) -> int:
        """Size of the values that a destination rank stages because the trainer's sharding splits blocks."""
        if not self.quantised:
            return 0
        return staged_bytes(self.quantised[destination_rank % len(self.traces)], self.incoming(destination_rank))

    def check(self, policy_dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise UserError, before a byte moves, if the policy's weights do not fit into the engines.

        `policy_dtypes` are those of the policy's HuggingFace tensors; see `check_traces`.
        """
        _ = self.plan
        check_traces(self.traces, held_dtypes(self.architecture, policy_dtypes, self.quantisation))

    @property
    def _dtypes(self) -> list[Mapping[str, torch.dtype]]:
        return [trace.dtypes for trace in self.traces]

    @property
    def _message_bytes(self) -> int:
        # A worker that relays has four buckets in place of two; together they must take no more memory.
        half = max(self.bucket_bytes // 2, min(self.bucket_bytes, ALIGNMENT_BYTES))
        return half if self.node_once else self.bucket_bytes


def held_dtypes(
    architecture: Architecture, policy_dtypes: Mapping[str, torch.dtype], quantisation: Quantisation | None
) -> Mapping[str, torch.dtype]:
    """The dtype of each tensor of the checkpoint in the form that the engines hold."""
    if quantisation is None:
        return policy_dtypes
    return quantisation.number_format.checkpoint(architecture, policy_dtypes)[1]


def check_traces(traces: Sequence[LoadTrace], policy_dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise UserError if the traces, which may be incomplete, show an engine that does not fit the policy.

    An engine may hold a tensor only in a dtype that represents all values of the policy's dtype.
    """
    for trace in traces:
        for name, reason in trace.refused.items():
            raise UserError(
                f"the engine is of another model than the policy, {reason} ({name}): give rollout.engine_args nothing"
                " that makes it another than that of model.path"
            )
        for placement in trace.shard.placements:
            held, given = trace.dtypes[placement.local_name], policy_dtypes[placement.hf_name]
            if torch.promote_types(held, given) != held:
                raise UserError(
                    f"the engine keeps {placement.hf_name} as {dtype_name(held)} and the policy is trained in"
                    f" {dtype_name(given)}: set rollout.engine_args.dtype or model.dtype, so that both are the same"
                )
