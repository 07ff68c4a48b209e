"""The tokens of a micro-batch that are trained on, end to end."""

from collections.abc import Mapping

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.ragged import Ragged
from megatron_ext.packing.packing import MicroBatch


def trained_tokens(micro_batch: MicroBatch) -> tuple[Tensor, Ragged, dict[str, Tensor]]:
    """Gather the T trained tokens of a micro-batch: those whose field `weights` is not 0 (NaN is not 0).

    Returns their positions among the T' of the micro-batch, long[T]; the number of trained tokens of each sequence,
    with the padding as the last sequence; and every field at these positions, [T]. Prompts, padding and masked tokens
    are left out, so no value there, not even NaN, can reach a loss.
    """
    trained = micro_batch.fields["weights"] != 0
    # Cumulative counts at the end of each sequence; their differences are the counts. The last sequence is the padding,
    # so there is one even without sequences.
    ends = trained.cumsum(0)[micro_batch.cu_seqlens[1:].long() - 1]
    lengths = ends.diff(prepend=ends.new_zeros(1))
    places = trained.nonzero().squeeze(1)
    return places, Ragged(lengths), {name: values[places] for name, values in micro_batch.fields.items()}


def check_tokens_finite(what: str, values: Tensor, responses: Ragged, names: Mapping[str, Tensor]) -> None:
    """Raise UserError for the first of `values` [T] that is NaN or infinite, naming `what` it is and its response.

    `names` are those of the micro-batch, each long[N]: they identify a response, if there are any.
    """
    finite = values.isfinite()
    if bool(finite.all()):
        return
    place = int((~finite).nonzero()[0])
    sequence = int((responses.ends <= place).sum())
    where = " to ".join(f"{name} {int(numbers[sequence])}" for name, numbers in names.items()) or "a response"
    raise UserError(
        f"the {what} of a token of {where} of this step is {float(values[place])}, not a finite number: the step "
        "is not trained on; look for the first step at which the loss or the gradient norm went wrong, and lower "
        "megatron.lr"
    )
