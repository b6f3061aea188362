"""System calls that the shaper gives up: what its capabilities would allow, and no shaping of links needs.

SYS_ADMIN lets it enter namespaces, and would let it mount; SYS_PTRACE lets it open them, and would let it read and
change the memory of every process of the host. The filter holds for all that it starts, and cannot be taken off.
"""

from __future__ import annotations

import ctypes
import platform
import struct

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""linux/audit.h: how the kernel's filter knows a machine, and the column of its numbers."""
DENIED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "sethostname": (170, 161),
    "swapon": (167, 224),
}
"""Numbers of system calls on each machine."""
_OTHER_NUMBERS = 0x40000000
"""From here on x86_64 has the same calls under other numbers."""
_NUMBER, _ARCHITECTURE = 0, 4
"""Where the kernel puts them, for the filter to read."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _NOT_PERMITTED = 0x7FFF0000, 0x00050001
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter for a machine: code, how far to jump if true and if false, operand."""
    architecture, column = _ARCHITECTURES[machine]
    numbers = [each[column] for each in DENIED.values()]
    count = len(numbers)
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 0, count + 3, architecture),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, count + 1, 0, _OTHER_NUMBERS),
        *((_IF_EQUAL, count - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOT_PERMITTED),
    ]


def confine() -> bool:
    """Give up these calls for this process and all that it starts; return False on a machine of unknown numbers.

    Raises OSError where the kernel takes no filter.
    """
    if platform.machine() not in _ARCHITECTURES:
        return False
    made = instructions(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in made))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(made), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for request in ((_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.addressof(program), 0, 0)):
        if libc.prctl(*map(ctypes.c_ulong, request)) != 0:
            raise OSError(ctypes.get_errno(), "system calls cannot be given up")
    return True
