"""Fixtures that all tests share."""

import os

from hypothesis import settings

# The same examples in every run, and no wall-time limits.
settings.register_profile("deterministic", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("deterministic")

# Ray would start a cluster by itself, on all interfaces and to the end of the process, where code asks of one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
