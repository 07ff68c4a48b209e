"""Rollout routing replay (arXiv 2510.11370): routers send tokens to the experts that the engine sent them to.

Only the choice is the engine's. The experts are weighted by the trainer's router, which gets their gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext import device
from megatron_ext.packing.packing import Part
from megatron_ext.routing.routed_experts import Records, Routing, layers_with_experts
from megatron_ext.routing.router import Choice, GroupScoredChoice, require_all_met, routers


class RecordedChoice(RouterReplay):
    """megatron-core's replay; tokens without a record go to the router's own choice.

    A schedule runs several micro-batches forward before the first of them runs backward, and a recomputed layer runs
    twice. With a gradient, each router runs once per micro-batch, in order, so it takes the oldest record. Without a
    gradient, it runs before the next micro-batch is announced, so it takes the newest.
    """

    def __init__(self) -> None:
        super().__init__()
        # This list has the routers of all models and chunks of the process.
        RouterReplay.global_router_replay_instances.remove(self)
        self.followed: list[Tensor] = []

    def set_experts(self, experts: Tensor | None) -> None:
        """Send the next micro-batch to `experts` [tokens, topk], -1 for a token without a record."""
        self.target_topk_idx = experts
        if experts is not None and torch.is_grad_enabled():
            self.replay_backward_list.append(experts)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """Return the scores and the indices of each token's experts; `scores` is [tokens, experts]."""
        assert default_compute_topk is not None
        own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.target_topk_idx is None:
            return own
        recorded = self.replay_backward_list.pop(0) if torch.is_grad_enabled() else self.target_topk_idx
        experts = torch.where(recorded < 0, own[1], recorded)
        if torch.is_grad_enabled():
            self._count(recorded, own[1])
        return scores.gather(1, experts), experts

    def _count(self, recorded: Tensor, own: Tensor) -> None:
        """Record for each token of a micro-batch whether it had a record, and whether that changed its experts."""
        is_recorded = recorded[:, 0] >= 0
        differs = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & is_recorded
        self.followed.append(is_recorded.to(torch.uint8) + differs)


@contextmanager
def replaying(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which `set_replayed_experts` sets the experts of the next micro-batch; nothing is replayed afterwards.

    Raises RuntimeError if a router did not use a record that it was given, so that its tokens went to other experts.
    """
    try:
        yield
        expected = (choice.replay_backward_list for choice in _choices(chunks))
        require_all_met(expected, "of routed experts that it had to replay")
    finally:
        for choice in _choices(chunks):
            choice.clear_indices()


def set_replayed_experts(chunk: torch.nn.Module, own: Part) -> None:
    """Send the tokens of the chunk's next forward pass to their recorded experts, or to the chunk's own choice."""
    config: TransformerConfig = unwrap_model(chunk).config
    if own.routed_experts is None:
        for choice in _choices([chunk]):
            choice.set_experts(None)
        return
    routing = routing_of(config)
    places = {layer: place for place, layer in enumerate(layers_with_experts(vars(config), config.num_layers))}
    of_chunk = list(routers(chunk))
    if not of_chunk:
        return
    rows = _rows_of_this_rank(own.routed_experts, config)
    experts = routing.experts_of(rows, [places[router.layer_number - 1] for router in of_chunk])
    for router, of_layer in zip(of_chunk, device.sent(experts, own.tokens.device).unbind(1), strict=True):
        _install(router).set_experts(of_layer)


def take_counts(chunks: Sequence[torch.nn.Module], on: torch.device) -> Tensor:
    """int64[4]: counts of replayed choices in this rank's passes with a gradient since the last call.

    The first two count pairs of a token and a layer: those with a record, and those of them whose experts differ from
    the router's choice. The last two count tokens: those with a record in any layer, and those with a difference in any
    layer. Collective: the last pipeline stage counts the tokens for all stages.
    """
    of_routers = [torch.cat(choice.followed) for choice in _choices(chunks) if choice.followed]
    for choice in _choices(chunks):
        choice.followed.clear()
    # Routers see the same tokens in the same order; a stage without routers does not know their number.
    followed = torch.stack(of_routers) if of_routers else torch.zeros(1, 0, dtype=torch.uint8, device=on)
    of_tokens = _over_stages(followed.amax(0))
    is_counted = parallel_state.is_pipeline_last_stage()
    return torch.stack(
        [
            *((followed > 0).sum(), (followed > 1).sum()),
            *((of_tokens > 0).sum() * is_counted, (of_tokens > 1).sum() * is_counted),
        ]
    )


def _over_stages(of_tokens: Tensor) -> Tensor:
    """The maximum of each token's value over the pipeline stages."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    size = torch.tensor(len(of_tokens), device=of_tokens.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=stages)
    largest = torch.nn.functional.pad(of_tokens, (0, int(size) - len(of_tokens)))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=stages)
    return largest


def routing_of(config: TransformerConfig) -> Routing:
    """The sizes of a model's routing. Raises UserError if it has no experts."""
    return Routing.of(vars(config), config.num_layers)


def _rows_of_this_rank(records: Records, config: TransformerConfig) -> Records:
    """The records of the tokens that this rank's routers see: with sequence parallelism, its part of them."""
    if not config.sequence_parallel:
        return records
    parts = records.tokens.chunk(parallel_state.get_tensor_model_parallel_world_size())
    return Records(records.arrays, parts[parallel_state.get_tensor_model_parallel_rank()])


def _choices(chunks: Sequence[torch.nn.Module]) -> Iterator[RecordedChoice]:
    for chunk in chunks:
        for router in routers(chunk):
            if (choice := _installed(router)) is not None:
                yield choice


def _installed(router: TopKRouter) -> RecordedChoice | None:
    held = router.router_replay
    replay = held.replay if isinstance(held, GroupScoredChoice) else held
    return replay if isinstance(replay, RecordedChoice) else None


def _install(router: TopKRouter) -> RecordedChoice:
    """Return the router's replay, installing it if necessary."""
    if (choice := _installed(router)) is not None:
        return choice
    choice, held = RecordedChoice(), router.router_replay
    router.router_replay = replace(held, replay=choice) if isinstance(held, GroupScoredChoice) else choice
    return choice
