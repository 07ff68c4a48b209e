"""Tests of megatron_ext: the device layer goes in before megatron is imported."""

import torch

from megatron_ext import device

device.install()
torch.set_num_threads(1)
