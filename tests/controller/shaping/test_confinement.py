"""The confinement of the shaper: denied system calls fail in spite of capabilities."""

from __future__ import annotations

import subprocess
import sys

# A process cannot take its confinement off, so the test runs in a process of its own. The program checks the denied
# calls, an allowed call in a child, and a denied call in a child.
PROGRAM = """
import ctypes, errno, os, subprocess, sys
from testbed_controller.shaping.confinement import DENIED, confine
confine()
libc, library = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")
for name in DENIED:
    result = libc.syscall(library.seccomp_syscall_resolve_name(name.encode()), 0, 0, 0, 0, 0)
    assert (result, ctypes.get_errno()) == (-1, errno.EPERM), (name, result)
child = "import os; os.open('/proc/self/ns/net', os.O_RDONLY); print(os.getpid() > 0)"
assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout == "True\\n"
mount = library.seccomp_syscall_resolve_name(b"mount")
child = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.syscall({mount}); print(ctypes.get_errno())"
assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout == f"{errno.EPERM}\\n"
"""


def test_only_denied_calls_fail_in_process_and_children() -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert outcome.returncode == 0, outcome.stderr
