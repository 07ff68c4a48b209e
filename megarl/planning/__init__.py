"""A step predicted from sizes alone: memory, seconds, a search; and its refit's traffic, ports, replay, picture."""
