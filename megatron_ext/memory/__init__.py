"""A rank's memory: offloading of its state to the host, and host copies of tensors."""
