"""Megatron's options by its own names: which there are, which work here, and who reads them."""
