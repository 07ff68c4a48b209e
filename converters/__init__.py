"""Weights in any layout, as plain tensors and files, without processes or Megatron objects.

A model is described in HuggingFace's coordinates (`layout`, `layouts`), by one file for each family (`architectures`).
Two layouts make a plan (`plan`), and a plan has a cost (`cost`). Checkpoints are read and written in a stream
(`formats`, `fp8`, `stream`, `manifest`), and inspected without changing them (`examine`).
"""
