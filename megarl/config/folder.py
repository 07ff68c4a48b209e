"""Where the files of configs/ are."""

import sys
from pathlib import Path


def recipes_folder() -> Path:
    """Where megarl's own recipes lie: beside the packages in a checkout, below the prefix when installed."""
    checkout = Path(__file__).resolve().parents[2] / "configs"
    return checkout if checkout.is_dir() else Path(sys.prefix, "share", "megarl", "configs")
