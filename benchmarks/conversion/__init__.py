"""Conversions to measure: synthetic checkpoints, the contenders, and their report."""
