"""What all tests share."""

from hypothesis import settings

# The same examples in every run, and no wall-time limits.
settings.register_profile("deterministic", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("deterministic")
