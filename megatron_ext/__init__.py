"""Megatron-core prepared for RL: everything that one rank needs, without prompts, rewards or engines.

Only `device` distinguishes CPU and GPU, and workarounds are in `compat`. `model` builds a rank's model, `packing` and
`forward` run packed sequences through it, `log_probs` computes log-probs, and `checkpoint` saves it.
"""
