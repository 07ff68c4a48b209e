"""Processes of a run: the Ray cluster, the groups of Megatron ranks, and the group of engines."""
