"""Lets the tests of this folder be collected without a GPU, too."""

from megatron_ext import device

# Before the first test imports megatron-core.
device.install()
