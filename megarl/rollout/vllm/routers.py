"""Gives routers of vLLM 0.32.0 the precision of the trainer's: float32 logits."""

import functools
from typing import Any

import torch


def keep_logits_in_float32() -> None:
    """Make every router return float32 logits.

    vLLM rounds them to the model's dtype, except for GLM-4.5, and for DeepSeek's models if config.json says so. Near
    ties then go to other experts than in the trainer, which never rounds them.
    """
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    original = GateLinear.__init__

    @functools.wraps(original)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.out_dtype is None:
            self.set_out_dtype(torch.float32)

    GateLinear.__init__ = make
