"""A run from its opening to its checkpoints: what all programs share."""
