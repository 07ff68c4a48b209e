"""The distributed optimizer: its shards, its parts in host memory, FSDP2, and what overlaps with it."""
