"""Values that are not numbers stop the step, by name."""

from collections.abc import Callable

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.ragged import Ragged


def check_finite(what: str, values: Tensor, name: Callable[[int], str], responses: Ragged | None = None) -> None:
    """All `values` are numbers: one per response [N], or with `responses` one per token [T].

    Raises UserError with the first value that is NaN or infinite: `what` it is, the response as `name` calls the i-th
    one, and the position of the token in the response.
    """
    # A sum is finite only if its terms are, and needs no memory; that of large numbers may overflow by itself.
    if not len(values) or bool(values.sum().isfinite()):
        return
    bad = (~values.isfinite()).nonzero()
    if not len(bad):
        return
    place = int(bad[0])
    value = float(values[place])
    if responses is None:
        where = name(place)
    else:
        index = int((responses.ends > place).nonzero()[0])
        where = f"token {place - int(responses.starts[index])} of {name(index)}"
    raise UserError(f"the {what} of {where} is {value}, not a finite number: this step is not trained on; find out why")
