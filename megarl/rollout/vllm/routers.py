"""Routers of vLLM 0.32.0 in the precision of the trainer's: logits of experts in float32."""

import functools
from typing import Any

import torch


def keep_logits_in_float32() -> None:
    """Have every router give its logits in float32.

    vLLM rounds them to the model's type, but for DeepSeek's models where config.json says otherwise and for GLM-4.5:
    near ties then go to other experts than in the trainer, which never rounds them.
    """
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    original = GateLinear.__init__

    @functools.wraps(original)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.out_dtype is None:
            self.set_out_dtype(torch.float32)

    GateLinear.__init__ = make
