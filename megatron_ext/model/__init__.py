"""Builds a GPTModel from an architecture: its modules, its heads, and layers for multi-token prediction."""
