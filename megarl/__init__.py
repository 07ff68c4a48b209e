"""The framework: one program per way to train (start with `train.py`), over packages that import only downwards.

`stages` holds the stages of a step, `algorithms` its mathematics and `cluster` its processes; `refit` and `resharding`
move weights to the engines of `rollout`. `docs/concepts.md` has diagrams and one line about every package.
"""
