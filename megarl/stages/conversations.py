"""Training batches of conversations, and metrics of held-out ones."""

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


def held_out_metrics(trainer: TrainerGroup, conversations: Sequence[Conversation]) -> dict[str, float]:
    """Loss and accuracy per token of the assistant, and the share of conversations in which all of them are greedy."""
    batch = conversation_batch(conversations, "token_mean")
    predictions = trainer.predictions(Batch.of(batch), ["log_probs", "greedy"], temperature=1.0)
    log_probs, greedy = (fetch_tensor(predictions[name]) for name in ("log_probs", "greedy"))
    weights = batch.fields["weights"].double()
    return {
        "eval_loss": -float((weights * log_probs).sum()),
        "eval_token_accuracy": float((weights * greedy).sum()),
        "exact_match": float(exact_matches(greedy, weights > 0, batch.lengths).float().mean()),
    }
