"""Bad input is refused with one clear sentence, and leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversions import everything_in

from converters.errors import UserError


def assert_refused(work: Callable[..., Any], source: Path, out: Path, message: str, **options: Any) -> None:
    """`work(source, out)` raises a UserError of one line with `message`; what is beside `out` stays as it was."""
    before = everything_in(out.parent) if out.parent.is_dir() else None
    with pytest.raises(UserError, match=message) as raised:
        work(source, out, **options)
    assert "\n" not in str(raised.value)
    assert (everything_in(out.parent) if out.parent.is_dir() else None) == before
