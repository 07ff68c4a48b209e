"""HuggingFace transformers as an engine: simple, exact and slow; the reference for the other engines."""
