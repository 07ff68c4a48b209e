"""Compiles the kernel for a GPU, which needs none, and prints the PTX of packing in each format of codes and of
unpacking, as they are launched.

In a process of its own: at the end of one that has compiled, Triton complains about itself.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.resharding.kernels.launch_table import CodeFormat
from megarl.resharding.kernels.on_gpu import launch_options
from megarl.resharding.kernels.on_gpu.move import move

HOPPER = GPUTarget("cuda", 90, 32)
SIGNATURE = dict(zip(move.arg_names, ("*i64", "*i32", "*i64", *["constexpr"] * 4), strict=True))

# An engine keeps codes as they come.
LAUNCHES = [*((code_format, True) for code_format in CodeFormat), (CodeFormat.NONE, False)]
for code_format, to_bucket in LAUNCHES:
    constants = {(3,): int(code_format), (4,): to_bucket, (5,): True, (6,): True}
    source = ASTSource(move, SIGNATURE, constexprs=constants, attrs={})
    print(triton.compile(source, target=HOPPER, options=dict(launch_options(code_format))).asm["ptx"])
