"""A seccomp filter against system calls that the shaper's capabilities allow but link shaping does not need.

SYS_ADMIN is needed to enter namespaces, but also allows mounting; SYS_PTRACE is needed to open namespaces, but also
allows access to the memory of every process of the host. The filter complements the engine's own seccomp profile,
applies to all child processes, and cannot be removed.
"""

from __future__ import annotations

import ctypes
import errno

DENIED = (
    # CAP_SYS_ADMIN: the file systems of the host.
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "move_mount",
    "open_tree",
    "fsopen",
    "fsmount",
    "mount_setattr",
    # CAP_SYS_PTRACE: the memory and files of other processes.
    "open_by_handle_at",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "process_madvise",
    # The kernel itself.
    "bpf",
    "perf_event_open",
    "init_module",
    "finit_module",
    "kexec_load",
    "keyctl",
    "sethostname",
    "swapon",
)
_LIBRARY = "libseccomp.so.2"
"""Library in every Debian, since apt depends on it."""
# seccomp.h: SCMP_ACT_ALLOW, and SCMP_ACT_ERRNO, whose lower half is the error number.
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000


def confine() -> None:
    """Make the system calls in `DENIED` fail with EPERM, for the process and all children.

    Raises OSError if the library is missing or the kernel rejects the filter.
    """
    library = ctypes.CDLL(_LIBRARY)
    # ctypes would otherwise cut the pointer down to 32 bits.
    library.seccomp_init.restype = ctypes.c_void_p
    # By default all calls are allowed.
    rules = ctypes.c_void_p(library.seccomp_init(_ALLOW))
    for name in DENIED:
        number = library.seccomp_syscall_resolve_name(name.encode())
        _check(library.seccomp_rule_add(rules, _FAIL | errno.EPERM, number, 0))
    _check(library.seccomp_load(rules))
    library.seccomp_release(rules)


def _check(result: int) -> None:
    """Raise OSError for a result of libseccomp that is negative, which is an error number."""
    if result < 0:
        raise OSError(-result, "the kernel rejects the filter of system calls")
