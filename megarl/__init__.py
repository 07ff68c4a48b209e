"""The framework: a program for each way to train, `train.py` first, over rooms that import only downwards.

A step is in `stages`, its mathematics in `algorithms`, its processes in `cluster`; weights reach the engines of
`rollout` through `refit` and `resharding`. `docs/concepts.md` has pictures, and a line for every room.
"""
