"""Peak rates of GPUs from their data sheets, and their memory as CUDA reports it, for forecasts and for utilisation."""

from dataclasses import dataclass

_TERA, _GIGA, _GIB = 1e12, 1e9, 1024**3


@dataclass(frozen=True)
class Device:
    """A GPU. Rates are dense FLOP/s, sizes bytes.

    Example: Device(989e12, 1979e12, 85e9, 3350e9, 450e9), which is an H100
    """

    bf16_flops: float
    fp8_flops: float
    """Equal to `bf16_flops` on a GPU without 8-bit matmuls."""
    memory_bytes: float
    """All that a program can allocate: of the 80 GiB of an "80 GB" GPU, the driver keeps about one."""
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    """Per direction; PCIe's rate for a GPU without NVLink."""
    nvlink_gpus: int = 8
    """GPUs connected by NVLink in the usual machine."""


def _device(
    bf16_tflops: float, fp8_tflops: float, gib: float, gbytes_per_s: float, nvlink_gbytes_per_s: float, gpus: int = 8
) -> Device:
    return Device(
        bf16_tflops * _TERA,
        fp8_tflops * _TERA,
        gib * _GIB,
        gbytes_per_s * _GIGA,
        nvlink_gbytes_per_s * _GIGA,
        gpus,
    )


DEVICES = {
    "A100": _device(312, 312, 79.2, 2039, 300),
    "A800": _device(312, 312, 79.2, 2039, 200),
    "H20": _device(148, 296, 95, 4000, 450),
    "H100 PCIe": _device(756, 1513, 79.1, 2000, 300, 2),
    "H100 NVL": _device(835, 1671, 93.1, 3900, 300, 2),
    "H100": _device(989, 1979, 79.1, 3350, 450),
    "H800": _device(989, 1979, 79.1, 3350, 200),
    "H200 NVL": _device(835, 1671, 139.7, 4800, 450, 4),
    "H200": _device(989, 1979, 139.7, 4800, 450),
    "GH200": _device(989, 1979, 94.5, 4000, 450, 1),
    "L40S": _device(362, 733, 44.4, 864, 32),
    "B200": _device(2250, 4500, 178.3, 7700, 900),
    "GB200": _device(2500, 5000, 184.3, 8000, 900, 72),
}
"""Part of a device's name -> TFLOP/s in bf16 and fp8; GiB, as torch reports them when out of memory ("a total capacity
of 79.11 GiB", with ECC); GB/s of memory; GB/s of NVLink per direction; GPUs connected by NVLink."""


def device_named(name: str) -> Device | None:
    """The device with a name such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    longest_first = sorted(DEVICES, key=len, reverse=True)
    return next((DEVICES[known] for known in longest_first if known in name), None)


def peak_bf16_flops(device: str) -> float | None:
    """Peak of a device by its name; None if it is not known."""
    found = device_named(device)
    return found.bf16_flops if found else None
