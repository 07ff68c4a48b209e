"""Log-probabilities and entropy of labels under logits whose vocabulary is cut over tensor-parallel ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from converters.errors import UserError


@dataclass(frozen=True)
class LogProbs:
    """What the model says about the labels [T] of a micro-batch, the same on every tensor-parallel rank."""

    log_probs: Tensor
    """float32[T]: log p(label), of the distribution softmax(logits / temperature)."""
    entropy: Tensor
    """float32[T]: of that distribution, in nats."""
    greedy: Tensor
    """bool[T]: the label is what greedy decoding gives, the first of the largest logits."""


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
) -> LogProbs:
    """Log-probability, entropy and greedy flag of every label, differentiable in the logits.

    `logits` [T, columns] are this rank's columns of the vocabulary (rank r of `tp_group` holds r * columns onwards);
    `labels` is long[T] in [0, vocab_size). Columns from `vocab_size` on are padding and have probability 0; so has a
    label there: its log-probability is -inf. Without a group the columns are the whole vocabulary.

    All arithmetic is fp32 whatever the type of the logits, on `chunk_tokens` rows at a time: besides its result it
    needs memory for a few fp32 copies of that many rows, never of all logits. One all-gather of five numbers per
    token is the only communication, forward; backward needs none, since every rank computes the same loss. Values
    that are not finite show in the results.

    Raises UserError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise UserError(f"log-probabilities need a temperature above 0, not {temperature}: set rollout.temperature")
    shard = _Shard.of(logits, tp_group, vocab_size)
    log_probs, entropy, greedy = _LogProbs.apply(logits, labels, tp_group, shard, temperature, chunk_tokens)
    return LogProbs(log_probs, entropy, greedy)


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary: real columns [start, start + width)."""

    start: int
    width: int

    @staticmethod
    def of(logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> "_Shard":
        columns = logits.shape[-1]
        start = columns * (dist.get_rank(group) if group is not None else 0)
        width = columns if vocab_size is None else min(max(vocab_size - start, 0), columns)
        return _Shard(start, width)

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label, and whether the label is in this shard (else the column is 0)."""
        columns = labels - self.start
        here = (columns >= 0) & (columns < self.width)
        return columns.masked_fill(~here, 0), here


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        shard: _Shard,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = range(0, len(logits), chunk_tokens)
        parts = [
            _summarise(
                _scaled(logits, shard, start, chunk_tokens, temperature), labels[start : start + chunk_tokens], shard
            )
            for start in rows
        ]
        summary = torch.cat(parts) if parts else logits.new_zeros(0, 5, dtype=torch.float64)
        largest, log_total, log_probs, entropy, best = _combine(_gather(summary, group))
        ctx.save_for_backward(logits, labels, largest, log_total, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        greedy = best == labels
        ctx.mark_non_differentiable(greedy)
        return log_probs, entropy, greedy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _grad_greedy: None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        logits, labels, largest, log_total, entropy = ctx.saved_tensors
        shard, size = ctx.shard, ctx.chunk_tokens
        gradient = torch.zeros_like(logits)
        for start in range(0, len(logits), size):
            chunk = slice(start, start + size)
            log_p = _scaled(logits, shard, start, size, ctx.temperature)
            # One after the other: their sum would lose the small log_total beside a large logit.
            log_p.sub_(largest[chunk, None]).sub_(log_total[chunk, None])
            p = log_p.exp()
            # d log p(label) / d x_j = [j = label] - p_j;  dH / d x_j = -p_j (log p_j + H).
            local = torch.zeros_like(p)
            if grad_entropy is not None:
                local -= log_p.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
            if grad_log_probs is not None:
                local -= grad_log_probs[chunk, None]
            local *= p
            if grad_log_probs is not None and shard.width:
                columns, here = shard.locate(labels[chunk])
                local.scatter_add_(1, columns[:, None], (grad_log_probs[chunk] * here)[:, None])
            gradient[chunk, : shard.width] = local.div_(ctx.temperature)
        return gradient, None, None, None, None, None


def _scaled(logits: Tensor, shard: _Shard, start: int, size: int, temperature: float) -> Tensor:
    # The division makes a new tensor also where .float() does not, so that callers may write into it.
    return logits[start : start + size, : shard.width].float() / temperature


def _summarise(x: Tensor, labels: Tensor, shard: _Shard) -> Tensor:
    """Per row: largest x, its index in the vocabulary, sum e, sum e (x - largest), x of the label; float64[rows, 5].

    e is exp(x - largest). The x of a label that lies in another shard is -inf.
    """
    if not shard.width:
        # The lowest finite value, not -inf, whose difference times the sum of 0 would not be a number.
        empty = (torch.finfo(torch.float32).min, 0.0, 0.0, 0.0, float("-inf"))
        return x.new_tensor(empty, dtype=torch.float64).expand(len(x), 5)
    largest, best = x.max(dim=-1)
    columns, here = shard.locate(labels)
    label = x.gather(1, columns[:, None]).squeeze(1).masked_fill(~here, float("-inf"))
    x.sub_(largest[:, None])
    e = x.exp()
    return torch.stack(
        [values.double() for values in (largest, best + shard.start, e.sum(-1), x.mul_(e).sum(-1), label)], dim=-1
    )


def _gather(summary: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The summaries of all shards, [shards, T, 5]."""
    if group is None or dist.get_world_size(group) == 1:
        return summary[None]
    shards = dist.get_world_size(group)
    gathered = summary.new_empty(shards * len(summary), summary.shape[1])
    dist.all_gather_into_tensor(gathered, summary.contiguous(), group=group)
    return gathered.view(shards, *summary.shape)


def _combine(summaries: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Largest logit and log sum e of the whole vocabulary, log p(label), entropy; and the index of the largest."""
    largest_of, best_of, sum_of, product_of, label_of = summaries.unbind(-1)
    # The first shard of several with the same largest logit: shards are in the order of the vocabulary.
    largest, winner = largest_of.max(dim=0)
    shift = largest_of - largest
    scale = shift.exp()
    total = (sum_of * scale).sum(0)
    product = ((product_of + shift * sum_of) * scale).sum(0)
    log_total = total.log()
    log_probs = label_of.amax(0) - largest - log_total
    entropy = log_total - product / total
    best = best_of.gather(0, winner[None]).squeeze(0)
    return largest.float(), log_total.float(), log_probs.float(), entropy.float(), best.long()
