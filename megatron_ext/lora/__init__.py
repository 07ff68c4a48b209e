"""LoRA: adapters of linear layers under any parallelism."""
