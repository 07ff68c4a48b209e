"""HuggingFace transformers as an engine: plain and exact, the reference for the others; slow."""
