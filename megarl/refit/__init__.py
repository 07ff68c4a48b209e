"""New weights into the engines: the two paths, the comparison, the start."""
