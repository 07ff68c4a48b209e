"""Refits to measure: a trainer and an engine of processes, the contenders, and their report."""
