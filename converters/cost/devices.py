"""Peak rates of GPUs, by which the use that is made of them is measured."""

PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H20": 148e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "L40S": 362e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}
"""Dense products in bfloat16, floating-point operations per second, by a part of the device's name: the data sheets."""


def peak_bf16_flops(device: str) -> float | None:
    """Peak of a device by its name, such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    longest_first = sorted(PEAK_BF16_FLOPS, key=len, reverse=True)
    return next((PEAK_BF16_FLOPS[name] for name in longest_first if name in device), None)
