"""Memory of a trainer's rank and of an engine's, in closed form."""
