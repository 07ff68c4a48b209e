"""Stop a step at the first value that is NaN or infinite, and name it."""

from collections.abc import Callable

from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.ragged import Ragged


def check_finite(what: str, values: Tensor, name: Callable[[int], str], responses: Ragged | None = None) -> None:
    """Check that all `values` are finite: one per response [N], or with `responses` one per token [T].

    Raises UserError for the first one that is NaN or infinite. The message calls the value `what` and the i-th response
    `name(i)`, and gives the position of the token in its response.
    """
    # The sum is finite only if all terms are, and needs no memory. It may overflow, so an infinite sum decides nothing.
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
