"""Block FP8: e4m3 codes and a float32 scale per block of 128 x 128, as DeepSeek-V3 was released (arXiv 2412.19437)."""

from functools import partial

import torch

from converters.architectures import Architecture
from converters.errors import UserError
from converters.fp8 import (
    BLOCK,
    CODES,
    SCALES_SUFFIX,
    dequantise_into,
    quantisation_config,
    quantise_into,
    quantised_names,
)
from converters.number_formats.engine_cuts import CUT_IN_COLUMNS, CUT_IN_ROWS
from converters.number_formats.number_format import NumberFormat

_JOINED = ("q_proj", "k_proj", "gate_proj", "up_proj", "q_a_proj")
"""Engines stack each of these above another matrix, whose blocks begin at the end of this one."""

_REPEATED = ("k_proj", "v_proj")
"""With more ranks than there are heads of these, engines give each rank a whole head."""


def check_blocks(name: str, architecture: Architecture, tensor_parallel: int, expert_tensor_parallel: int) -> None:
    """See `NumberFormat.check`; `name` is that of a format in blocks of 128 x 128."""
    for weight in sorted(quantised_names(architecture)):
        rows, columns = architecture.hf_shapes[weight]
        matrix = weight.rsplit(".", 2)[-2]
        if matrix in _JOINED and rows % BLOCK:
            raise UserError(
                f"rollout.weights={name} needs blocks of {BLOCK} x {BLOCK}, and {weight} has {rows} rows, on which"
                f" the engine puts another matrix: take a model of whose sizes each is a multiple of {BLOCK}, or leave"
                " rollout.weights out"
            )
        ranks = expert_tensor_parallel if ".experts." in weight else tensor_parallel
        if matrix in _REPEATED:
            ranks = min(ranks, architecture.dimensions["key_value"].units)
        for cut, length in ((CUT_IN_ROWS, rows), (CUT_IN_COLUMNS, columns)):
            if ranks > 1 and matrix in cut and (length // ranks) % BLOCK:
                raise UserError(
                    f"rollout.weights={name} needs blocks of {BLOCK} x {BLOCK}, and an engine that cuts {weight} over"
                    f" {ranks} ranks cuts its {length} through them: give it fewer, or leave rollout.weights out"
                )


FP8_BLOCK = NumberFormat(
    name="fp8_block",
    title="block FP8",
    block=(BLOCK, BLOCK),
    codes=CODES,
    scales=torch.float32,
    scales_suffix=SCALES_SUFFIX,
    quantised_names=quantised_names,
    engine_config=quantisation_config,
    quantise_into=quantise_into,
    dequantise_into=dequantise_into,
    # One launch reads the weights (twice as many bytes), writes the codes, and computes their checksum.
    pack_passes=3,
    check=partial(check_blocks, "fp8_block"),
)
