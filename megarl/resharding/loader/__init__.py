"""Whole HuggingFace tensors in shared memory, for the engine's own loader."""
