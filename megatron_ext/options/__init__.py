"""Megatron's options under its own names: which exist, which are supported, and which class each belongs to."""
