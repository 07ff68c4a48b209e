"""How engines cut a layer's matrices over tensor-parallel ranks."""

from converters.architectures import Architecture
from converters.errors import UserError
from converters.fp8 import quantised_names

CUT_IN_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")
CUT_IN_COLUMNS = ("o_proj", "down_proj")


def check_columns(
    number_format: str, block: int, architecture: Architecture, tensor_parallel: int, expert_tensor_parallel: int
) -> None:
    """See `NumberFormat.check`: every rank's part of a row must consist of whole blocks of columns."""
    for name in sorted(quantised_names(architecture)):
        columns = architecture.hf_shapes[name][1]
        ranks = expert_tensor_parallel if ".experts." in name else tensor_parallel
        cut = ranks if name.rsplit(".", 2)[-2] in CUT_IN_COLUMNS else 1
        if columns % cut or (columns // cut) % block:
            where = f", which an engine cuts over {cut} ranks" if cut > 1 else ""
            raise UserError(
                f"rollout.weights={number_format} needs whole blocks of {block} columns, and {name} has"
                f" {columns}{where}: take a model of other sizes or fewer ranks, or leave rollout.weights out"
            )
