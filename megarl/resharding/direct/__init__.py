"""Shards straight into the parameters of an engine, along a plan that all ranks replay."""
