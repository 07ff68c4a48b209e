"""Looking at checkpoints of either kind without changing them: what is it, is it whole, are two of them the same."""

from converters.examine.difference import Difference, ValueDifference, compare
from converters.examine.inspection import Inspection, inspect
from converters.examine.verification import Verification, verify

__all__ = ["Difference", "Inspection", "ValueDifference", "Verification", "compare", "inspect", "verify"]
