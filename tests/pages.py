"""The pages for people: README, docs, results of benchmarks."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def pages(root: Path) -> dict[str, str]:
    """Each page with its text."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "benchmarks").rglob("*.md"))]
    return {page.relative_to(root).as_posix(): page.read_text() for page in found if page.exists()}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
