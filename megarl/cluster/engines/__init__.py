"""The engines of a run as one object: distributes requests over them, and restarts dead ones."""
