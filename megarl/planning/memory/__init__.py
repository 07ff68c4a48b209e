"""Memory of a trainer rank and of an engine rank, in closed form."""
