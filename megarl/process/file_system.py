"""The type of the file system that a folder is on."""

from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_INCOHERENT = ("nfs", "nfs4", "ceph", "cifs", "smb3", "9p", "afs", "beegfs", "fuse")
"""Types on which a machine writes back whole pages of a memory-mapped file, overwriting what others wrote meanwhile.

Some programs that serve a `fuse` do, such as fuse.juicefs.
"""
_COHERENT = ("lustre", "gpfs", "wekafs")
"""Shared types that do not."""


def type_of(path: Path) -> str:
    """The type of the file system of a path, as named by the kernel: ext4, nfs4, lustre."""
    real, found, nearest = path.resolve(), "", -1
    for line in _MOUNTS.read_text().splitlines():
        _, place, kind, *_ = line.split()
        mounted = Path(place.replace("\\040", " "))
        # The last of several mounts at one path hides the others.
        if real.is_relative_to(mounted) and len(mounted.parts) >= nearest:
            found, nearest = kind, len(mounted.parts)
    return found


def is_shared(path: Path) -> bool:
    """Whether the path is on a file system that other machines may share."""
    return _family(type_of(path)) in (*_INCOHERENT, *_COHERENT)


def lost_in_export(folder: Path, machines: int) -> str | None:
    """Why processes on `machines` machines cannot map the files of an export together; None if they can."""
    kind = type_of(folder)
    if machines < 2 or _family(kind) not in _INCOHERENT:
        return None
    return (
        f"{folder} is on a file system of type {kind}, where"
        f" {machines} machines cannot write an export together: make it of the last checkpoint"
        " (megarl export --megatron CHECKPOINT --out FOLDER), or move output_dir to another file system and start the"
        " same command with it"
    )


def _family(kind: str) -> str:
    """The type without the name of its program: fuse for fuse.juicefs."""
    return kind.partition(".")[0]
