"""Layouts of each kind of holder: HuggingFace files, Megatron ranks, torch_dist checkpoints, engines as traced."""
