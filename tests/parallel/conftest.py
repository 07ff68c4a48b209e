"""Tests of every parallel layout: the device layer goes in before megatron is imported."""

import pytest
import torch

from megatron_ext import device

device.install()
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--page", action="store_true", help="write the differences to benchmarks/results/parallel_layouts_cpu.md"
    )
    parser.addoption("--missing", action="store_true", help="run only layouts of which the page has no figure")
