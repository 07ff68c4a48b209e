"""Training batches of conversations, and the share of them that a model reproduces."""

from collections.abc import Sequence

import torch

from megarl.algorithms import AGGREGATIONS, exact_matches
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.data import Conversation
from megatron_ext.packing.packing import RaggedBatch


def conversation_batch(conversations: Sequence[Conversation], aggregation: str, unit: int = 1) -> RaggedBatch:
    """Pack conversations end to end; the field `weights` is `aggregation` over the assistant's tokens, 0 elsewhere."""
    mask = torch.tensor([bool(said) for conversation in conversations for said in conversation.mask])
    lengths = torch.tensor([sum(conversation.mask) for conversation in conversations])
    return RaggedBatch(
        tokens=torch.tensor([token for conversation in conversations for token in conversation.token_ids]),
        lengths=torch.tensor([len(conversation.token_ids) for conversation in conversations]),
        fields={"weights": torch.zeros(len(mask)).masked_scatter(mask, AGGREGATIONS[aggregation](lengths))},
        unit=unit,
    )


def exact_match_share(trainer: TrainerGroup, conversations: Sequence[Conversation]) -> float:
    """The share of conversations in which every assistant token is the greedy prediction after the tokens before it."""
    batch = conversation_batch(conversations, "token_mean")
    greedy = fetch_tensor(trainer.predictions(Batch.of(batch), ["greedy"], temperature=1.0)["greedy"])
    return float(exact_matches(greedy, batch.fields["weights"] > 0, batch.lengths).float().mean())
