"""Attention over packed sequences: which kernels compute it, context parallelism, shared prefixes."""
