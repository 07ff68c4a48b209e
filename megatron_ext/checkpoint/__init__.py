"""Checkpoints in Megatron's distributed format: written in the background, verified, read at any layout."""
