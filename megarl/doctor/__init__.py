"""Checks the machine that megarl runs on: its equipment, and what would not work."""
