"""The manifest of a checkpoint: its files with checksums, and whether they are still intact."""

from converters.manifest.checking import Check, checks_of, damages, missing_files, require_files
from converters.manifest.content import MANIFEST, Manifest, read_manifest, write_manifest
from converters.manifest.finding import manifest_of

__all__ = [
    "MANIFEST",
    "Check",
    "Manifest",
    "checks_of",
    "damages",
    "manifest_of",
    "missing_files",
    "read_manifest",
    "require_files",
    "write_manifest",
]
