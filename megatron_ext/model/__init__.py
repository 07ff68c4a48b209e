"""Builds a GPTModel from an architecture: its modules, its heads, and layers that predict further ahead."""
