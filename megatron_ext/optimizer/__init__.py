"""The distributed optimizer: its shards, CPU offload, FSDP2, and overlapped communication."""
