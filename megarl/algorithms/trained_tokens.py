"""The tokens of a micro-batch that are trained on, end to end."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.ragged import Ragged
from megatron_ext.packing import MicroBatch


@dataclass(frozen=True)
class TrainedTokens:
    """The T tokens with a weight, of the N sequences of a micro-batch, padding's included; a sequence may have none.

    Values at other places, prompts, padding and masked tokens, are taken out, so that nothing there, not even NaN,
    can reach a loss.
    """

    indices: Tensor
    """long[T]: where they are among the T' places of the micro-batch."""
    ragged: Ragged
    """Lengths of the N sequences."""
    weights: Tensor
    """[T]"""
    fields: Mapping[str, Tensor]
    """[T'] each, as the micro-batch has them."""
    names: Mapping[str, Tensor]
    """long[N] each, padding left out, as the micro-batch has them."""

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> "TrainedTokens":
        """Take the tokens of `micro_batch` at which its field `weights` is not 0 (NaN is not 0)."""
        weights = micro_batch.fields["weights"]
        trained = weights != 0
        # How many there are up to the end of each sequence; the difference is each sequence's own. Padding is the last
        # of them, so there is one even where no sequence is.
        ends = trained.cumsum(0)[micro_batch.cu_seqlens[1:].long() - 1]
        lengths = ends.diff(prepend=ends.new_zeros(1))
        indices = trained.nonzero().squeeze(1)
        return cls(indices, Ragged(lengths), weights[indices], micro_batch.fields, micro_batch.names)

    def take(self, values: Tensor) -> Tensor:
        """[T'] to [T]; differentiable."""
        return values[self.indices]

    def field(self, name: str) -> Tensor:
        """The field `name` of the micro-batch at the trained tokens, [T]."""
        return self.take(self.fields[name])

    def weigh(self, values: Tensor) -> Tensor:
        """The weighted sum of values [T]: a scalar, 0 without any token."""
        return (self.weights * values).sum()

    def check_finite(self, what: str, values: Tensor) -> None:
        """Raise UserError with the first of `values` [T] that is NaN or infinite: `what` it is, and of which response.

        The `names` say which, where there are any.
        """
        finite = values.isfinite()
        if bool(finite.all()):
            return
        place = int((~finite).nonzero()[0])
        sequence = int((self.ragged.lengths.cumsum(0) <= place).sum())
        where = " to ".join(f"{name} {int(numbers[sequence])}" for name, numbers in self.names.items()) or "a response"
        raise UserError(
            f"the {what} of a token of {where} of this step is {float(values[place])}, not a finite number: the step "
            "is not trained on; look for the first step at which the loss or the gradient norm went wrong, and lower "
            "megatron.lr"
        )
