"""Which kernel vLLM takes for linear layers in INT8, by the GPU that it believes to have."""

from unittest.mock import patch

import pytest


def _chosen(capability):
    """Names of the kernels on a GPU of this compute capability: by default, and where CUTLASS is asked for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear import Int8ScaledMMLinearLayerConfig
    from vllm.platforms import PlatformEnum, current_platform

    # Its import changes which, as in the process of a worker.
    import megarl.rollout.vllm.worker  # noqa: F401

    on_gpu = {
        "_enum": PlatformEnum.CUDA,
        "is_cuda": lambda: True,
        "is_cuda_alike": lambda: True,
    }
    layer = Int8ScaledMMLinearLayerConfig(True, True, True)

    def choose(backend):
        config = VllmConfig()
        config.kernel_config.linear_backend = backend
        with set_current_vllm_config(config), patch.multiple(current_platform, create=True, **on_gpu):
            try:
                kernels = linear._POSSIBLE_INT8_KERNELS
                kernel = linear.choose_scaled_mm_linear_kernel(layer, kernels, capability, quantization="int8_w8a8")
            except ValueError as error:
                return str(error)
        return kernel.__name__

    return choose("auto"), choose("cutlass")


@pytest.mark.long
def test_blackwell_multiplies_whole_numbers_by_triton(ranks):
    cutlass, triton = (f"{name}Int8ScaledMMLinearKernel" for name in ("Cutlass", "Triton"))
    assert ranks.alone(_chosen, 90) == (cutlass, cutlass)
    default, refusal = ranks.alone(_chosen, 100)
    assert default == triton
    assert "has no INT8 from compute capability 10.0 on" in refusal
