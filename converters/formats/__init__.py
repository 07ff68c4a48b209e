"""Streaming readers and writers of checkpoint files."""
