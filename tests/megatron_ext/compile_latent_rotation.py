"""Compiles the kernels that rotate queries of latent attention, as megarl has them launched, and prints their PTX.
Before it, for each kernel that rotates heads, how many of 12 a program may take.

In a process of its own: at the end of one that has compiled, Triton complains about itself.
"""

from megatron.core.fusions.fused_mla_yarn_rope_apply import (
    rotary_bwd_kv_kernel,
    rotary_bwd_q_kernel,
    rotary_fwd_kv_kernel,
    rotary_fwd_q_kernel,
)
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_ext import compat

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {"COS": "*fp32", "SIN": "*fp32", "cu_seqlens_q": "*i32"}
HEADS = {"emb_dim": 64, "head_num": 128}
"""DeepSeek-V3's."""

compat.install()
for kernel in (rotary_fwd_q_kernel, rotary_bwd_q_kernel, rotary_fwd_kv_kernel, rotary_bwd_kv_kernel):
    kernel.nargs = {"head_num": 12}
    print("of 12:", *(launch.kwargs["BLOCK_H"] for launch in kernel.prune_configs({})))
for kernel in (rotary_fwd_q_kernel, rotary_bwd_q_kernel):
    names = kernel.fn.arg_names
    # Beyond this many heads at a time a kernel only spills.
    for launch in (each for each in kernel.configs if each.kwargs["BLOCK_H"] <= 16):
        given = {**HEADS, **launch.kwargs}
        signature = {name: "constexpr" if name in given else TYPES.get(name, "i32") for name in names}
        signature[names[0]] = "*bf16"
        constants = {(names.index(name),): value for name, value in given.items()}
        source = ASTSource(kernel.fn, signature, constexprs=constants, attrs={})
        print(compile_kernel(source, target=HOPPER, options={"num_warps": launch.num_warps}).asm["ptx"])
