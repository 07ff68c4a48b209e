"""Processes: a Ray cluster, the group of Megatron ranks and the group of engines."""
