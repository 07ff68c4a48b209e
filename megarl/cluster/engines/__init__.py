"""The engines of a run as one object: requests are spread over them, and dead ones are restarted."""
