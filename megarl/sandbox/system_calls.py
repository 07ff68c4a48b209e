"""A seccomp filter of the system calls that a sandboxed program may not use."""

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from errno import ENOSYS, EPERM
from typing import NamedTuple

from megarl.sandbox.libc import call


class _Numbers(NamedTuple):
    x86_64: int
    aarch64: int


_ALWAYS: Mapping[str, _Numbers] = {
    "socket": _Numbers(41, 198),
    "io_uring_setup": _Numbers(425, 425),
    "memfd_create": _Numbers(319, 279),
    "memfd_secret": _Numbers(447, 447),
    "shmget": _Numbers(29, 194),
    "msgget": _Numbers(68, 186),
    "semget": _Numbers(64, 190),
    "mq_open": _Numbers(240, 180),
    "ptrace": _Numbers(101, 117),
    "process_vm_readv": _Numbers(310, 270),
    "process_vm_writev": _Numbers(311, 271),
    "unshare": _Numbers(272, 97),
    "setns": _Numbers(308, 268),
    "mount": _Numbers(165, 40),
    "fsopen": _Numbers(430, 430),
    "bpf": _Numbers(321, 280),
    "perf_event_open": _Numbers(298, 241),
    "userfaultfd": _Numbers(323, 282),
    "add_key": _Numbers(248, 217),
    "request_key": _Numbers(249, 218),
    "keyctl": _Numbers(250, 219),
}
"""Network, memory outside the limits, other processes, namespaces, and rarely used calls that exploits rely on."""
_SIGNALS: Mapping[str, _Numbers] = {
    "kill": _Numbers(62, 129),
    "tkill": _Numbers(200, 130),
    "tgkill": _Numbers(234, 131),
    "rt_sigqueueinfo": _Numbers(129, 138),
    "rt_tgsigqueueinfo": _Numbers(297, 240),
    "pidfd_open": _Numbers(434, 434),
    "pidfd_send_signal": _Numbers(424, 424),
}
_FCNTL, _IOCTL = _Numbers(72, 25), _Numbers(16, 29)
_F_SETFL, _O_ASYNC = 4, 0x2000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP, _FIOASYNC = 0x8901, 0x8902, 0x5452
_CLONE = _Numbers(56, 220)
_CLONE3 = 435
_PRLIMIT = _Numbers(302, 261)
_NEW_NAMESPACES = 0x7E020080
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_FLAG = 0x40000000

# The BPF instructions needed here, and the words they read.
_LOAD, _RETURN = 0x20, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def forbid(*, may_signal: bool) -> None:
    """Deny these calls to this process and all its descendants, irrevocably.

    Unless `may_signal`, sending signals is denied, too. Raises OSError if the machine does not allow filters.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(ENOSYS, f"no filter of system calls is known for the architecture {machine}")
    program = _filter(machine, may_signal)
    code = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)


def _filter(machine: str, may_signal: bool) -> bytes:
    refused = [*_ALWAYS.values(), *(() if may_signal else _SIGNALS.values())]
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_AT_LEAST, _X32_FLAG, 0, 1),
        _step(_RETURN, _ERROR | ENOSYS),
        # The filter cannot read its arguments, which are in memory; on ENOSYS the C library falls back to clone.
        _step(_JUMP_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ERROR | ENOSYS),
    ]
    for numbers in refused:
        code += [_step(_JUMP_EQUAL, getattr(numbers, machine), 0, 1), _step(_RETURN, _ERROR | EPERM)]
    if not may_signal:
        code += _without_signals_of_files(machine)
    code += [
        _step(_JUMP_EQUAL, getattr(_CLONE, machine), 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _step(_RETURN, _ERROR | EPERM),
        _step(_RETURN, _ALLOW),
        # Only its own limits, addressed as process 0, may be changed.
        _step(_JUMP_EQUAL, getattr(_PRLIMIT, machine), 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_JUMP_EQUAL, 0, 1, 0),
        _step(_RETURN, _ERROR | EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _without_signals_of_files(machine: str) -> list[bytes]:
    """Steps that deny signals by files: to an owner set for a file, or to whoever uses a terminal."""
    to_be_signalled = [
        _step(_JUMP_EQUAL, _F_SETFL, 0, 3),
        _step(_LOAD, _THIRD_ARGUMENT),
        _step(_JUMP_ANY_BIT, _O_ASYNC, 0, 1),
        _step(_RETURN, _ERROR | EPERM),
    ]
    return [
        *_without_commands(getattr(_FCNTL, machine), (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX), to_be_signalled),
        *_without_commands(getattr(_IOCTL, machine), (_FIOSETOWN, _SIOCSPGRP, _FIOASYNC)),
    ]


def _without_commands(number: int, commands: Sequence[int], others: Sequence[bytes] = ()) -> list[bytes]:
    """Steps for the call `number`: deny it if its second argument is in `commands`, else take `others`, then allow."""
    code = [_step(_LOAD, _SECOND_ARGUMENT)]
    for command in commands:
        code += [_step(_JUMP_EQUAL, command, 0, 1), _step(_RETURN, _ERROR | EPERM)]
    code += [*others, _step(_RETURN, _ALLOW)]
    return [_step(_JUMP_EQUAL, number, 0, len(code)), *code]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)
