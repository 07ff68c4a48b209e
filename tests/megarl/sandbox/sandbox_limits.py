"""Limits of programs that need little."""

from megarl.sandbox.run import Limits

MIB = 1024**2
LIMITS = Limits(
    wall_s=6.0,
    cpu_s=6,
    memory_bytes=512 * MIB,
    processes=8,
    file_bytes=16 * MIB,
    open_files=64,
    output_bytes=MIB,
)
