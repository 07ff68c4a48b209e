"""The Megatron ranks as one object: batches are cut over them, and what they return is joined."""
