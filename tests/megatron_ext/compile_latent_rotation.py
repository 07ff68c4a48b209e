"""Compiles the kernels that rotate queries of latent attention, as megarl has them launched, and prints their PTX.
Before it, for each kernel that rotates heads, how many of 12 a program may take, and the types of the offsets at which
it finds a token.

In a process of its own: at the end of one that has compiled, Triton complains about itself.
"""

import re
from collections.abc import Mapping

from megatron.core.fusions.fused_mla_yarn_rope_apply import (
    rotary_bwd_kv_kernel,
    rotary_bwd_q_kernel,
    rotary_fwd_kv_kernel,
    rotary_fwd_q_kernel,
)
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner, Config

from megatron_ext import compat

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    **dict.fromkeys(("COS", "SIN"), "*fp32"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), "*i32"),
    **dict.fromkeys(("Q", "DO", "KV", "K_POS_EMB", "O_KEY", "O_VALUE", "dK", "dV", "dKV", "dEMB"), "*bf16"),
}
HEADS = {"emb_dim": 64, "head_num": 128, "qk_head_dim": 128, "k_dim": 128, "v_dim": 128}
"""DeepSeek-V3's."""


def compiled(kernel: Autotuner, launch: Config) -> Mapping[str, str]:
    """The kernel as the launch has it, by the names of its stages; numbers without a type of their own have 32 bits."""
    parameters = kernel.fn.params
    given = {name: value for name, value in (HEADS | launch.kwargs).items() if name in kernel.fn.arg_names}
    types = {each.name: each.annotation_type or TYPES.get(each.name, "i32") for each in parameters}
    source = ASTSource(
        kernel.fn,
        types | dict.fromkeys(given, "constexpr"),
        constexprs={(each.num,): given[each.name] for each in parameters if each.name in given},
        attrs={},
    )
    asm: Mapping[str, str] = compile_kernel(source, target=HOPPER, options={"num_warps": launch.num_warps}).asm
    return asm


compat.install()
for kernel in (rotary_fwd_q_kernel, rotary_bwd_q_kernel, rotary_fwd_kv_kernel, rotary_bwd_kv_kernel):
    kernel.nargs = {"head_num": 12}
    print("of 12:", *(launch.kwargs["BLOCK_H"] for launch in kernel.prune_configs({})))
    offsets = re.findall(r"muli %\w+, %stride_\w+_seq : (\w+)", compiled(kernel, kernel.configs[0])["ttir"])
    print("offsets:", *offsets)
for kernel in (rotary_fwd_q_kernel, rotary_bwd_q_kernel):
    # Beyond this many heads at a time a kernel only spills.
    for launch in (each for each in kernel.configs if each.kwargs["BLOCK_H"] <= 16):
        print(compiled(kernel, launch)["ptx"])
