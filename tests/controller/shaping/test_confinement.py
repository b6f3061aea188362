"""What the shaper may not ask of the kernel, whatever capabilities it has."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from testbed_controller.shaping.confinement import _ARCHITECTURES, _LOAD, _RETURN, DENIED, instructions

PROGRAM = """
import ctypes, errno, os, subprocess, sys
from testbed_controller.shaping.confinement import DENIED, _ARCHITECTURES, confine
import platform
assert confine()
libc, column = ctypes.CDLL(None, use_errno=True), _ARCHITECTURES[platform.machine()][1]
denied = (each[column] for each in DENIED.values())
refused = [libc.syscall(each, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM for each in denied]
assert all(refused), refused
child = "import os; os.open('/proc/self/ns/net', os.O_RDONLY); print(os.getpid() > 0)"
assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout == "True\\n"
"""


@pytest.mark.skipif(platform.machine() not in _ARCHITECTURES, reason="numbers of this machine's calls are not known")
def test_calls_that_no_shaping_needs_are_refused_and_others_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("machine", _ARCHITECTURES)
def test_the_filter_refuses_what_is_named_and_all_of_other_machines(machine: str) -> None:
    made, (architecture, column) = instructions(machine), _ARCHITECTURES[machine]

    def verdict(of: int, number: int) -> int:
        """Run the filter, as the kernel does."""
        place, value = 0, 0
        while True:
            code, true, false, operand = made[place]
            if code == _RETURN:
                return operand & 0xFFFF
            if code == _LOAD:
                value = of if operand == 4 else number
                place += 1
            else:
                holds = value == operand if code == 0x15 else value >= operand
                place += 1 + (true if holds else false)

    denied = {each[column] for each in DENIED.values()}
    assert {number for number in range(600) if verdict(architecture, number)} == denied
    assert verdict(architecture, 0x40000000 + 1)
    assert verdict(0x40000003, 1)
