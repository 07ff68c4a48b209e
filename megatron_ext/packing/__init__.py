"""Sequences to packed micro-batches: the same work for every rank, and common beginnings once."""
