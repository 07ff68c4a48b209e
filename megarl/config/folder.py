"""Finds the files of configs/."""

import json
import sys
from pathlib import Path
from typing import Any

from converters.errors import UserError, did_you_mean


def recipes_folder() -> Path:
    """The folder of megarl's own recipes: next to the packages in a checkout, below the prefix if installed."""
    checkout = Path(__file__).resolve().parents[2] / "configs"
    return checkout if checkout.is_dir() else Path(sys.prefix, "share", "megarl", "configs")


def known_model(name: str) -> dict[str, Any]:
    """The config.json of a model in configs/models/. Raises UserError for an unknown name."""
    folder = recipes_folder() / "models"
    names = sorted(path.stem for path in folder.glob("*.json"))
    if name not in names:
        hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
        raise UserError(f"model.name={name} is not known{hint}")
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def model_config_file(place: str, option: str) -> Path:
    """The config.json that a command is given by `option`: a file, a folder with one, or a name in configs/models.

    Raises UserError if there is none.
    """
    path = Path(place)
    if path.is_dir():
        return path / "config.json"
    if path.is_file():
        return path
    shipped = recipes_folder() / "models"
    if (named := shipped / f"{place}.json").is_file():
        return named
    names = ", ".join(sorted(file.stem for file in shipped.glob("*.json")))
    raise UserError(f"{option} {place} is no config.json, no folder with one and none of {names}")
