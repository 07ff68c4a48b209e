"""Reads a file that a command line names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from converters.errors import UserError


def read_given(file: Path) -> str:
    """The text of a script or a YAML file. Raises UserError for a missing file and for one that is not text."""
    try:
        return file.read_text()
    except FileNotFoundError as error:
        raise UserError(f"there is no file {file}") from error
    except IsADirectoryError as error:
        raise UserError(f"{file} is a folder: name a script") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as text ({error}); name a script") from error


@contextmanager
def yaml_errors_in_a_sentence(file: Path) -> Iterator[None]:
    """Context in which errors of reading a YAML file become a UserError."""
    try:
        yield
    except yaml.YAMLError as error:
        raise UserError(f"{file} cannot be read as YAML ({' '.join(str(error).split())}); name another file") from error
