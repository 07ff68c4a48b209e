"""The folder that a run writes: what may not lie in it, who may write there, how an export takes its place."""
