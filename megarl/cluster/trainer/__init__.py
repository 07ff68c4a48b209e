"""The Megatron ranks as one object: splits batches over them, and joins their results."""
