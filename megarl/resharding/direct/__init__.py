"""Writes shards straight into an engine's parameters, following a plan that every rank derives for itself."""
