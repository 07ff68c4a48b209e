"""Checkpoint files: `safetensors` of HuggingFace and `torch_dist` of Megatron, each read and written in a stream."""
