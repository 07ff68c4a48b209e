"""Stages of a training step: rollout, reward, filtering, batch, predictions, advantage, update; and evaluation.

Groups of samples go from one to the next, then the batch that they make (`fields.py` has all that it may hold).
"""
