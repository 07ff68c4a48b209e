"""A run from its start to its checkpoints: code that all programs share."""
