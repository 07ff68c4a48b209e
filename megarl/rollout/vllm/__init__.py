"""vLLM as an engine, in this process and its workers: sampling, its own arguments, weights, and what a CPU lacks."""
