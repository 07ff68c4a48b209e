"""Routers of mixtures of experts: their losses, their load, and replay of the experts that an engine chose."""
