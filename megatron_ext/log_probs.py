"""Log-probs and entropy of labels from hidden states, with logits computed a few rows at a time.

The output layer's vocabulary is sharded over tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from converters.errors import UserError

CHUNK_LOGITS = 2**25
"""Default number of logits computed at a time: 128 MiB of float32."""
_BLOCK_ELEMENTS = 2**24
"""Elements of a chunk's weight gradient computed at a time if it cannot be accumulated in one operation."""


@dataclass(frozen=True)
class LogProbs:
    """Predictions for the labels [T] of a micro-batch, the same on every tensor-parallel rank."""

    log_probs: Tensor
    """float32[T]: log p(label), of the distribution softmax(logits / temperature)."""
    entropy: Tensor
    """float32[T]: entropy of that distribution, in nats."""
    greedy: Tensor
    """bool[T]: whether the label is the greedy choice, the first of the largest logits."""
    probability_squares: Tensor | None = None
    """float32[T]: sum of p_j^2 over the vocabulary; None if gradients are recorded."""

    def placed(self, places: Tensor, count: int) -> "LogProbs":
        """Scatter to `places` long[T] of `count` labels, with 0 at all others; differentiable."""
        return self.mapped(lambda values: values.new_zeros(count).index_copy(0, places, values))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "LogProbs":
        """Apply `function` to each tensor."""
        squares = self.probability_squares
        return LogProbs(
            function(self.log_probs),
            function(self.entropy),
            function(self.greedy),
            None if squares is None else function(squares),
        )


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    fp32_logits: bool = False,
    chunk_tokens: int | None = None,
) -> LogProbs:
    """Log-probability, entropy and greedy flag of every label under logits = hidden @ weight^T.

    `hidden` is [T, H], the same on all ranks of `tp_group`. `weight` [columns, H] is this rank's part of the
    vocabulary (rank r holds r * columns onwards); `labels` is long[T] in [0, vocab_size). Columns from `vocab_size` on
    are padding and have probability 0; so has a label there: its log-probability is -inf. Without a group the columns
    are the whole vocabulary. With `softcap` c the logits become c * tanh(logits / c).

    The logits have the dtype of the weight, like an output layer's, or float32 with `fp32_logits`, without rounding in
    between. Everything after them is float32. They are computed for `chunk_tokens` rows at a time (if None, as many as
    make 2^25 logits), forward and again backward, so besides results and gradients only a few copies of those rows are
    in memory. The only communication is an all-gather of six numbers per token in the forward pass. Non-finite values
    propagate to the results.

    Differentiable in `hidden` and `weight`. The gradient of `hidden` is this rank's part, to be summed over `tp_group`
    (by the region that gave every rank the hidden states). The gradient of a weight with a float32 `main_grad`,
    Megatron's gradient buffer, is accumulated there; autograd then gets zeros, so that Megatron's hooks run.

    Raises UserError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise UserError(f"log-probabilities need a temperature above 0, not {temperature}: set rollout.temperature")
    shard = _Shard.of(weight, tp_group, vocab_size)
    rows = chunk_tokens or max(1, CHUNK_LOGITS // max(1, shard.width))
    output = _OutputLayer(tp_group, shard, temperature, softcap, fp32_logits, rows)
    recorded = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return LogProbs(*_LinearLogProbs.apply(hidden, weight, labels, output, recorded))


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary: real columns [start, start + width)."""

    start: int
    width: int

    @staticmethod
    def of(weight: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> "_Shard":
        columns = len(weight)
        start = columns * (dist.get_rank(group) if group is not None else 0)
        width = columns if vocab_size is None else min(max(vocab_size - start, 0), columns)
        return _Shard(start, width)

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label, and whether the label is in this shard (else the column is 0)."""
        columns = labels - self.start
        here = (columns >= 0) & (columns < self.width)
        return columns.masked_fill(~here, 0), here


@dataclass(frozen=True)
class _OutputLayer:
    """How hidden states become distributions."""

    group: dist.ProcessGroup | None
    shard: _Shard
    temperature: float
    softcap: float | None
    fp32_logits: bool
    chunk_tokens: int

    def chunks(self, tokens: int) -> list[slice]:
        """The slices of rows whose logits are computed together."""
        return [slice(start, start + self.chunk_tokens) for start in range(0, tokens, self.chunk_tokens)]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits of this rank's real columns, in the weight's dtype or float32, as a new tensor."""
        columns = weight[: self.shard.width].t()
        if not self.fp32_logits or weight.dtype == torch.float32:
            logits = hidden @ columns
        elif hidden.is_cuda:
            # Avoids a float32 copy of the weight.
            logits = torch.mm(hidden, columns, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ columns.float()
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def scaled(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in float32; in place if `logits` is float32."""
        return logits.float().div_(self.temperature)

    def gradient_of_logits(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Convert the gradient of the scaled logits to that of hidden @ weight^T; overwrites `gradient`."""
        gradient.div_(self.temperature)
        if self.softcap is not None:
            gradient.mul_(1 - (logits.float() / self.softcap).square_())
        return gradient


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, output: _OutputLayer, recorded: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parts = [
            _summarise(output.scaled(output.logits(hidden[chunk], weight)), labels[chunk], output.shard, not recorded)
            for chunk in output.chunks(len(hidden))
        ]
        summary = torch.cat(parts) if parts else hidden.new_zeros(0, 6, dtype=torch.float64)
        largest, log_total, log_probs, entropy, best, squares = _combine(_gather(summary, output.group))
        ctx.save_for_backward(hidden, weight, labels, largest, log_total, entropy)
        ctx.output, ctx.main_grad = output, getattr(weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        greedy = best == labels
        ctx.mark_non_differentiable(greedy)
        return log_probs, entropy, greedy, None if recorded else squares

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_others: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, labels, largest, log_total, entropy = ctx.saved_tensors
        output: _OutputLayer = ctx.output
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = _WeightGradient(weight, ctx.main_grad) if ctx.needs_input_grad[1] else None
        for chunk in output.chunks(len(hidden)):
            logits = output.logits(hidden[chunk], weight)
            # Only the backward pass of soft-capping needs the logits again.
            log_p = output.scaled(logits if output.softcap is None else logits.clone())
            # Subtracted one after the other, because their sum would lose a small log_total next to a large logit.
            log_p.sub_(largest[chunk, None]).sub_(log_total[chunk, None])
            gradient = _gradient_of_scaled(
                log_p,
                labels[chunk],
                output.shard,
                None if grad_log_probs is None else grad_log_probs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
                entropy[chunk],
            )
            gradient = output.gradient_of_logits(gradient, logits).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight[: output.shard.width], out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.add(gradient, hidden[chunk])
        return grad_hidden, None if grad_weight is None else grad_weight.result(), None, None, None


class _WeightGradient:
    """Accumulates the gradient of the output layer over chunks, in float32."""

    def __init__(self, weight: Tensor, main_grad: Tensor | None) -> None:
        self._weight = weight
        self._is_main = main_grad is not None and main_grad.dtype == torch.float32
        self._total = main_grad if self._is_main else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add the part of logits with `gradient` [rows, columns], computed from `hidden` [rows, H]; later columns get
        0.
        """
        assert self._total is not None
        total = self._total[: gradient.shape[1]]
        if gradient.dtype == total.dtype:
            total.addmm_(gradient.t(), hidden)
            return
        for start in range(0, len(total), rows := max(1, _BLOCK_ELEMENTS // hidden.shape[1])):
            block = gradient[:, start : start + rows].t()
            if hidden.is_cuda:
                # Avoids float32 copies of both.
                total[start : start + rows].add_(torch.mm(block, hidden, out_dtype=torch.float32))
            else:
                total[start : start + rows].addmm_(block.float(), hidden.float())

    def result(self) -> Tensor:
        """Gradient of the weight for autograd."""
        assert self._total is not None
        if self._is_main:
            return self._weight.new_zeros(()).expand_as(self._weight)
        return self._total.to(self._weight.dtype)


def _gradient_of_scaled(
    log_p: Tensor,
    labels: Tensor,
    shard: _Shard,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """The gradient of x where log_p = log softmax(x), [rows, columns]; overwrites `log_p`.

    d log p(label) / d x_j = [j = label] - p_j;  dH / d x_j = -p_j (log p_j + H).
    """
    p = log_p.exp()
    if grad_entropy is None:
        assert grad_log_probs is not None
        gradient = p.mul_(grad_log_probs[:, None]).neg_()
    else:
        factor = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_log_probs is not None:
            factor.add_(grad_log_probs[:, None])
        gradient = p.mul_(factor).neg_()
    if grad_log_probs is not None and shard.width:
        columns, here = shard.locate(labels)
        gradient.scatter_add_(1, columns[:, None], (grad_log_probs * here)[:, None])
    return gradient


def _summarise(x: Tensor, labels: Tensor, shard: _Shard, with_squares: bool) -> Tensor:
    """Per row: largest x, its index in the vocabulary, sum e, sum e (x - largest), x of the label, sum e^2.

    float64[rows, 6]; e is exp(x - largest). The x of a label in another shard is -inf. Without `with_squares` the last
    is 0. Overwrites `x`.
    """
    if not shard.width:
        # The lowest finite value, not -inf, which would give NaN when multiplied by the zero sum.
        empty = (torch.finfo(torch.float32).min, 0.0, 0.0, 0.0, float("-inf"), 0.0)
        return x.new_tensor(empty, dtype=torch.float64).expand(len(x), 6)
    largest, best = x.max(dim=-1)
    columns, here = shard.locate(labels)
    label = x.gather(1, columns[:, None]).squeeze(1).masked_fill(~here, float("-inf"))
    x.sub_(largest[:, None])
    e = x.exp()
    squares = torch.linalg.vector_norm(e, dim=-1).double().square() if with_squares else torch.zeros_like(largest)
    return torch.stack(
        [values.double() for values in (largest, best + shard.start, e.sum(-1), x.mul_(e).sum(-1), label, squares)],
        dim=-1,
    )


def _gather(summary: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The summaries of all shards, [shards, T, 6]."""
    if group is None or dist.get_world_size(group) == 1:
        return summary[None]
    shards = dist.get_world_size(group)
    gathered = summary.new_empty(shards * len(summary), summary.shape[1])
    dist.all_gather_into_tensor(gathered, summary.contiguous(), group=group)
    return gathered.view(shards, *summary.shape)


def _combine(summaries: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Largest logit and log sum e of the whole vocabulary, log p(label), entropy, index of the largest, sum p^2."""
    largest_of, best_of, sum_of, product_of, label_of, squares_of = summaries.unbind(-1)
    # On ties, the first shard has the first index, as shards are in vocabulary order.
    largest, winner = largest_of.max(dim=0)
    shift = largest_of - largest
    scale = shift.exp()
    total = (sum_of * scale).sum(0)
    product = ((product_of + shift * sum_of) * scale).sum(0)
    log_total = total.log()
    log_probs = label_of.amax(0) - largest - log_total
    entropy = log_total - product / total
    best = best_of.gather(0, winner[None]).squeeze(0)
    squares = (squares_of * scale.square()).sum(0) / total.square()
    return largest.float(), log_total.float(), log_probs.float(), entropy.float(), best.long(), squares.float()
