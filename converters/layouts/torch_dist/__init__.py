"""Megatron's distributed checkpoints as layouts."""

from converters.layouts.torch_dist.keys import cells, has_uniform_layers
from converters.layouts.torch_dist.planned import PlannedChunk, plan_chunks
from converters.layouts.torch_dist.stored import Piece, stored_pieces

__all__ = ["Piece", "PlannedChunk", "cells", "has_uniform_layers", "plan_chunks", "stored_pieces"]
