"""Stages of a training step: rollout, reward, filtering, batch, predictions, advantage, update; and evaluation.

Stages pass on groups of samples, and from `batch.py` on one batch made of them (`fields.py` lists all its fields).
"""
