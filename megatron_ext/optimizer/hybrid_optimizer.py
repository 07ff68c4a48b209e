"""Support for megatron-core's `optimizer_cpu_offload`: an optimizer that updates part of its parameters in host memory.

It holds one optimizer for each parameter on the host, and one for all others, and exposes their state as its own. A
change to its state must be made in theirs as well.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor


def offload_beside_a_cpu() -> None:
    """Make megatron-core offload parameters that are on a CPU as if they were on a GPU.

    By itself it offloads only parameters on a GPU, and without any, its step raises KeyError. With a GPU this must not
    be called: offloaded copies would stay on the GPU.
    """
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _cut


def _cut(self: HybridDeviceOptimizer, offload_fraction: float) -> tuple[Any, ...]:
    """Return groups of the host and of the device; parameter -> copy, copy -> parameter, parameter -> fp32 copy."""
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
    """Initialise the state to zeros before the first step; existing state is kept."""
    for part, parameter in _parameters(optimizer):
        state = part.state[parameter]
        if state:
            continue
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        if isinstance(part, torch.optim.Adam):
            state["step"] = torch.zeros((), device=parameter.device)
    optimizer._sync_sub_optimizers_state_to_hdo()


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that perform the updates: the parts of a hybrid optimizer, else the optimizer itself."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def host_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Copies of parameters, and their state, that a hybrid optimizer keeps on the host; others keep none."""
    for part in optimizer.cpu_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else ():
        for parameter, state in part.state.items():
            yield parameter
            yield from (value for value in state.values() if isinstance(value, Tensor))


@torch.no_grad()
def take_over(optimizer: HybridDeviceOptimizer) -> None:
    """Copy fp32 parameters that were loaded on the device to the host; all others have separate fp32 copies."""
    for parameter, copy in optimizer.gpu_params_map_cpu_copy.items():
        if parameter not in optimizer.param_to_fp32_param:
            copy.copy_(parameter)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop the fp32 copies of gradients that a step has made on the GPU, for gradients reduced in bf16.

    Otherwise they would stay until the next step replaces them, and they are not offloaded with the training state.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        for parameter, own in optimizer.param_to_fp32_param.items():
            # Copies on the host are allocated once and reused.
            if parameter not in optimizer.gpu_params_map_cpu_copy:
                own.grad = None


def _parameters(optimizer: HybridDeviceOptimizer) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    for part in optimizer.sub_optimizers:
        for group in part.param_groups:
            yield from ((part, parameter) for parameter in group["params"])
