"""Predicts a step from sizes alone: memory, seconds, a search; and its refit's traffic, ports, replay and picture."""
