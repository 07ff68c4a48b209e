"""Makes INT8 linear layers of vLLM 0.32.0 work on Blackwell, by another kernel."""

_BLACKWELL = 100
"""Compute capability, times ten."""


def leave_blackwell_to_triton() -> None:
    """Make the CUTLASS kernel decline GPUs that it was not compiled for.

    vLLM selects it on every GPU, and the first forward pass on Blackwell fails with "Int8 not supported on SM100". The
    next kernel in its list is Triton's, which keeps weights in the same form.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel as Kernel

    original = Kernel.is_supported

    def is_supported(_cls: type, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if compute_capability is not None and compute_capability >= _BLACKWELL:
            return False, "has no INT8 from compute capability 10.0 on"
        return original(compute_capability)

    Kernel.is_supported = classmethod(is_supported)
