"""Megatron-core made ready for RL: all that one rank needs, and nothing of prompts, rewards or engines.

`device` is the one place that knows a CPU from a GPU, `compat` the one for workarounds. The model of a rank is built by
`model`, fed packed sequences by `packing` and `forward`, asked for log-probs by `log_probs`, and saved by `checkpoint`.
"""
