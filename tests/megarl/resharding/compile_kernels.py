"""Compiles the kernel for a GPU, which needs none, and prints the PTX of packing and unpacking in each format of codes,
as they are launched.

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

for code_format in CodeFormat:
    for to_bucket in (True, False):
        constants = {(3,): int(code_format), (4,): to_bucket, (5,): True, (6,): True}
        source = ASTSource(move, SIGNATURE, constexprs=constants, attrs={})
        options = dict(launch_options(code_format, to_bucket=to_bucket))
        print(triton.compile(source, target=HOPPER, options=options).asm["ptx"])
