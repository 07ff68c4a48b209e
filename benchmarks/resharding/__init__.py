"""Refits to measure: a trainer and an engine as processes, the contenders, and their report."""
