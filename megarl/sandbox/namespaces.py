"""Namespaces of a sandbox: its own file system, processes, network and user."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from megarl.sandbox.libc import call

PROCESSES_BESIDE = 2
"""Processes of the sandbox itself that count towards the program's user, unless that is a separate user."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_MOUNT_SETATTR = 442
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NOBODY = 65534

_ROOT = Path("/sys")
"""Where the new root is assembled: a folder that every machine has, and whose contents are not needed."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc/alternatives", "etc/ld.so.cache")
_DEVICES = ("dev/null", "dev/zero", "dev/random", "dev/urandom")
_OUTSIDE_FILES = 4096


def enter(other_user: int) -> None:
    """Move this process, and its future children's process ids, into new namespaces.

    `other_user` 0 means that there is no separate user (`users.another_user`): a user namespace is created. Raises
    OSError if that is not allowed here.
    """
    own = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    if other_user:
        call("unshare", own)
        return
    user, group = os.getuid(), os.getgid()
    call("unshare", own | _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")


def _with_targets(path: Path) -> Iterator[Path]:
    """The path and, while it is a link, as in a virtual environment, the targets along the chain of links."""
    yield path
    if path.is_symlink():
        yield from _with_targets(path.parent / path.readlink())


def own_root(writable_bytes: int) -> None:
    """Change the root to one with the interpreter, the system's libraries, and a /tmp of `writable_bytes`.

    Raises OSError if that is not allowed here.
    """
    _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size=1m,nr_inodes={_OUTSIDE_FILES},mode=755")
    named = map(Path, (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))
    interpreter = sorted({place for path in named for place in _with_targets(path)})
    in_tmp = [path for path in interpreter if path.is_relative_to("/tmp")]
    for path in (*(Path("/") / name for name in (*_SYSTEM, *_DEVICES)), *interpreter):
        if path not in in_tmp:
            _bring(path)
    (_ROOT / "tmp").mkdir(exist_ok=True)
    _set_attributes(_ROOT, _READ_ONLY | _NO_SETUID)
    options = f"size={writable_bytes},nr_inodes={_OUTSIDE_FILES},mode=1777"
    _mount("tmpfs", _ROOT / "tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in in_tmp:
        _bring(path)
        if not path.is_symlink():
            _set_attributes(_ROOT / path.relative_to("/"), _READ_ONLY | _NO_SETUID)
    os.chdir(_ROOT)
    call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")  # the old root is now on top of the new one
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _bring(source: Path) -> None:
    target = _ROOT / source.relative_to("/")
    if not source.exists() or target.exists():  # a path below a mounted folder is mounted, too
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    target.mkdir() if source.is_dir() else target.touch()
    _mount(str(source), target, None, _MS_BIND | _MS_REC)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    try:
        call("mount", _bytes(source), _bytes(str(target)), _bytes(kind), flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"mounting {source or ''} at {target}: {error.strerror}") from error


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _set_attributes(target: Path, attributes: int) -> None:
    """Set the attributes of a mount and of all mounts below it."""
    wanted = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    size = struct.calcsize("QQQQ")
    call("syscall", _MOUNT_SETATTR, _AT_FDCWD, str(target).encode(), _AT_RECURSIVE, ctypes.addressof(wanted), size)
