"""Examines checkpoints of either kind without changing them: describes, verifies and compares them."""

from converters.examine.difference import Difference, ValueDifference, compare
from converters.examine.digest import weights_digest
from converters.examine.inspection import Inspection, inspect
from converters.examine.verification import Verification, verify

__all__ = [
    "Difference",
    "Inspection",
    "ValueDifference",
    "Verification",
    "compare",
    "inspect",
    "verify",
    "weights_digest",
]
