"""Passes whole HuggingFace tensors through shared memory to the engine's own loader."""
