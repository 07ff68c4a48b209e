"""The stages of a training step, one file each."""
