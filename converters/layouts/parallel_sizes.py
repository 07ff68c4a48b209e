"""Parallel sizes: how Megatron cuts a model and a batch, and which part a rank has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm, prod

from converters.errors import UserError, nearest_sizes


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's coordinate in each kind of parallelism."""

    tensor: int
    context: int
    pipeline: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of Megatron's parallel groups, under Megatron's names.

    Raises UserError if the sizes contradict each other.
    """

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline stage."""
    context_parallel_size: int = 1
    """Ranks that share a sequence; all have the same weights."""
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """Tensor parallelism of the experts; None is tensor_model_parallel_size."""
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    use_torch_fsdp2: bool = False
    """Whether weights are sharded by rows over data and context parallel ranks, as by torch's FSDP2."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, bool) and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        self._check_fully_sharded()
        tensor, context = self.tensor_model_parallel_size, self.context_parallel_size
        dense = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
        self._check_world(dense if context > 1 else {"tensor_model_parallel_size": tensor})
        expert, expert_tensor = self.expert_model_parallel_size, self.expert_tensor_size
        follows = "" if self.expert_tensor_parallel_size else " (not set: as tensor_model_parallel_size)"
        self._check_world(
            {"expert_model_parallel_size": expert, f"expert_tensor_parallel_size{follows}": expert_tensor}
        )
        if self.chunks > 1 and self.pipeline_model_parallel_size == 1:
            raise UserError(
                f"virtual_pipeline_model_parallel_size is {self.chunks} with pipeline_model_parallel_size 1;"
                " virtual stages need at least 2 pipeline stages"
            )
        uneven = self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage
        if uneven and self.pipeline_model_parallel_size == 1:
            raise UserError(
                "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage is set with"
                " pipeline_model_parallel_size 1; they need at least 2 pipeline stages"
            )

    def _check_fully_sharded(self) -> None:
        expert_tensor = self.expert_tensor_parallel_size
        reasons = {
            f"pipeline_model_parallel_size={self.pipeline_model_parallel_size}": (
                "megatron-core's wrapper frees the weights of a stage between its micro-batches, which overlap",
                self.pipeline_model_parallel_size > 1,
            ),
            f"expert_model_parallel_size={self.expert_model_parallel_size}": (
                "megatron-core's wrapper cuts experts over ranks that have other ones",
                self.expert_model_parallel_size > 1,
            ),
            f"expert_tensor_parallel_size={expert_tensor}": (
                "megatron-core's wrapper cuts experts over ranks that have other parts of them",
                self.expert_tensor_size != self.tensor_model_parallel_size,
            ),
        }
        for setting, (reason, is_refused) in reasons.items():
            if self.use_torch_fsdp2 and is_refused:
                raise UserError(f"use_torch_fsdp2 works without {setting} only: {reason}; leave one of the two out")

    def _check_world(self, factors: Mapping[str, int]) -> None:
        factors = {**factors, "pipeline_model_parallel_size": self.pipeline_model_parallel_size}
        if self.world_size % prod(factors.values()):
            raise UserError(
                f"{self.world_size} ranks cannot be divided by {' x '.join(factors)} ="
                f" {' x '.join(map(str, factors.values()))}; change one of these sizes, or use"
                f" {self._nearest_worlds()} ranks"
            )

    def _nearest_worlds(self) -> str:
        dense = self.tensor_model_parallel_size * self.context_parallel_size
        expert = self.expert_model_parallel_size * self.expert_tensor_size
        step = lcm(dense, expert) * self.pipeline_model_parallel_size
        below = self.world_size // step * step
        return f"{below} or {below + step}" if below else str(step)

    @property
    def chunks(self) -> int:
        """Model chunks per rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that an expert is cut over."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def stage_ranks(self) -> int:
        """Number of ranks in a pipeline stage."""
        return self.world_size // self.pipeline_model_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that the experts of a layer are distributed over, whole or in parts."""
        return self.expert_model_parallel_size * self.expert_tensor_size

    @property
    def data_parallel_size(self) -> int:
        """Number of parts into which a batch is split."""
        return self.stage_ranks // (self.tensor_model_parallel_size * self.context_parallel_size)

    def coordinates(self, rank: int) -> RankCoordinates:
        """The coordinates of `rank`, in Megatron's order tp-cp-ep-dp-pp (the leftmost varies fastest)."""
        return RankCoordinates(
            tensor=rank % self.tensor_model_parallel_size,
            context=rank // self.tensor_model_parallel_size % self.context_parallel_size,
            pipeline=rank // self.stage_ranks,
            expert=rank // self.expert_tensor_size % self.expert_model_parallel_size,
            expert_tensor=rank % self.expert_tensor_size,
        )

    @property
    def weight_copies(self) -> int:
        """Number of ranks in a pipeline stage that have the same non-expert weights or, with FSDP2, share the rows."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_copies(self) -> int:
        """Number of ranks in a pipeline stage that have the same part of the experts."""
        return self.stage_ranks // self.expert_ranks

    def weight_copy(self, rank: int) -> int:
        """Index of `rank` among `weight_copies`, in the order of Megatron's data-parallel groups with context ranks."""
        return rank // self.tensor_model_parallel_size % self.weight_copies

    @property
    def unsharded(self) -> "ParallelSizes":
        """The same sizes with whole weights, as they are loaded before FSDP2 shards them."""
        return replace(self, use_torch_fsdp2=False)

    def data_parallel_rank(self, rank: int) -> int:
        """The share of a batch that `rank` works on, 0 to data_parallel_size - 1."""
        return rank // (self.tensor_model_parallel_size * self.context_parallel_size) % self.data_parallel_size

    def holds_predictions(self, rank: int) -> bool:
        """Whether `rank` is the one that returns the results, among the ranks that share its part of a batch."""
        place = self.coordinates(rank)
        return place.tensor == place.context == 0 and place.pipeline == self.pipeline_model_parallel_size - 1

    def padded_vocabulary(self, vocab_size: int) -> int:
        """The `vocab_size` of a GPTModel: rounded up to a multiple of tensor_model_parallel_size."""
        return -(-vocab_size // self.tensor_model_parallel_size) * self.tensor_model_parallel_size

    def layers_of_stages(self, num_layers: int) -> list[int]:
        """How many of `num_layers` layers each pipeline stage has; raises UserError if they cannot be distributed."""
        stages: list[int | None] = [None] * self.pipeline_model_parallel_size
        stages[0] = self.num_layers_in_first_pipeline_stage
        if self.pipeline_model_parallel_size > 1:
            stages[-1] = self.num_layers_in_last_pipeline_stage
        left = num_layers - sum(stage or 0 for stage in stages)
        open_stages = stages.count(None)
        if left < 0 or (left > 0) != (open_stages > 0):
            raise UserError(self._taken_by_ends(num_layers, open_stages))
        if open_stages and left % open_stages:
            raise UserError(
                f"{left} of the {num_layers} layers (num_hidden_layers) cannot be shared out evenly to {open_stages}"
                " pipeline stages; change pipeline_model_parallel_size (the nearest that all layers can be shared out"
                f" to is {self._nearest_stages(num_layers)}) or set num_layers_in_first_pipeline_stage and"
                " num_layers_in_last_pipeline_stage"
            )
        counts = [left // open_stages if stage is None else stage for stage in stages]
        for count in counts:
            if count % self.chunks:
                nearest = nearest_sizes(
                    self.chunks, lambda chunks: not any(each % chunks for each in counts), max(counts)
                )
                raise UserError(
                    f"a pipeline stage of {count} layers cannot be cut into {self.chunks} chunks; change"
                    f" virtual_pipeline_model_parallel_size (the nearest that can be is {nearest}) or"
                    " pipeline_model_parallel_size"
                )
        return counts

    def _taken_by_ends(self, num_layers: int, other_stages: int) -> str:
        """Describe how the first and last stage leave no layers to the others, or leave layers unassigned."""
        counts = {"first": self.num_layers_in_first_pipeline_stage, "last": self.num_layers_in_last_pipeline_stage}
        taken = {which: count for which, count in counts.items() if count}
        settings = ", ".join(f"num_layers_in_{which}_pipeline_stage = {count}" for which, count in taken.items())
        take, them = ("take", "them") if len(taken) > 1 else ("takes", "it")
        result = f"so that none are left for {other_stages} more; lower {them} or pipeline_model_parallel_size"
        if not other_stages:
            result = f"and there is no other stage; give them {num_layers} together"
        return (
            f"the {' and the '.join(taken)} pipeline stage ({settings}) {take} {sum(taken.values())} of the"
            f" {num_layers} layers (num_hidden_layers), {result}"
        )

    def _nearest_stages(self, num_layers: int) -> str:
        stages = self.pipeline_model_parallel_size
        return nearest_sizes(stages, lambda count: num_layers % (count * self.chunks) == 0, num_layers)

    def layers(self, num_layers: int, pipeline_rank: int, chunk: int) -> range:
        """Global indices of the layers in a model chunk.

        The chunks of all stages interleave, as in megatron-core's `get_transformer_layer_offset`.
        """
        counts = [count // self.chunks for count in self.layers_of_stages(num_layers)]
        first = chunk * sum(counts) + sum(counts[:pipeline_rank])
        return range(first, first + counts[pipeline_rank])
