"""Peaks of devices by their names, as CUDA says them."""

import pytest

from converters.cost.devices import DEVICES, peak_bf16_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
    ],
)
def test_the_longest_name_that_fits_is_the_device(name: str, teraflops: int) -> None:
    assert peak_bf16_flops(name) == teraflops * 1e12


def test_a_device_that_is_not_known_has_no_peak() -> None:
    assert peak_bf16_flops("cpu") is None


@pytest.mark.parametrize(
    ("name", "mib_of_nvidia_smi"),
    [("A100", 81_920), ("H100", 81_559), ("H20", 97_871), ("H200", 143_771), ("B200", 183_359), ("L40S", 46_068)],
)
def test_memory_is_what_the_driver_leaves_of_what_it_says(name: str, mib_of_nvidia_smi: int) -> None:
    assert 0.97 < DEVICES[name].memory_bytes / (mib_of_nvidia_smi * 1024**2) < 1
