"""An optimizer that updates a part of its parameters in host memory: megatron-core's `optimizer_cpu_offload`.

It holds an optimizer for each parameter that is on the host, and one for the others, and hands their state on as its
own: what is done to its state has to be done to theirs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor


def offload_beside_a_cpu() -> None:
    """Let megatron-core offload parameters that are on a CPU, as if they were on a GPU.

    By itself it offloads only parameters on a GPU; without any, its step ends in a KeyError. Beside a GPU this would
    leave there what is to be on the host.
    """
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _cut


def _cut(self: HybridDeviceOptimizer, offload_fraction: float) -> tuple[Any, ...]:
    """Groups of the host and of the device; parameter -> copy, copy -> parameter, parameter -> its fp32 values."""
    of_host, of_device, copies, fp32 = [], [], {}, {}
    left = offload_fraction * sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
    for group in self.param_groups:
        host, device = {**group, "params": []}, {**group, "params": []}
        for parameter in group["params"]:
            inner, goes = parameter, left > 0
            if goes:
                inner = parameter.detach().clone()
                left -= parameter.numel()
            if self.param_update_in_fp32 and parameter.dtype != torch.float32:
                inner = fp32[parameter] = parameter.detach().clone().float()
            if goes:
                copies[parameter] = inner
            (host if goes else device)["params"].append(inner)
        of_host += [host] if host["params"] else []
        of_device += [device] if device["params"] else []
    return of_host, of_device, copies, {copy: parameter for parameter, copy in copies.items()}, fp32


def prime(optimizer: HybridDeviceOptimizer) -> None:
    """Make the state before the first step, as zeros; parameters that have a state keep it."""
    for part, parameter in _parameters(optimizer):
        state = part.state[parameter]
        if state:
            continue
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        if isinstance(part, torch.optim.Adam):
            state["step"] = torch.zeros((), device=parameter.device)
    optimizer._sync_sub_optimizers_state_to_hdo()


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Optimizers that take the steps: the parts of a hybrid optimizer, else the optimizer itself."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


@torch.no_grad()
def take_over(optimizer: HybridDeviceOptimizer) -> None:
    """Have on the host what was loaded into fp32 parameters of the device; others have fp32 values of their own."""
    for parameter, copy in optimizer.gpu_params_map_cpu_copy.items():
        if parameter not in optimizer.param_to_fp32_param:
            copy.copy_(parameter)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Forget copies of gradients that a step has made in fp32 on the GPU, of those that are reduced in bf16.

    Nothing else does before the next step makes others, and they are in no list of what may go to the host.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        for parameter, own in optimizer.param_to_fp32_param.items():
            # Copies on the host are made once.
            if parameter not in optimizer.gpu_params_map_cpu_copy:
                own.grad = None


def _parameters(optimizer: HybridDeviceOptimizer) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    for part in optimizer.sub_optimizers:
        for group in part.param_groups:
            yield from ((part, parameter) for parameter in group["params"])
