"""The netem backend, on a kernel that has it: the conformance suite and more, inside a virtual machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from netem.vm import ROOT, UNAVAILABLE

_FILES = ("tests/integration/test_conformance.py", "tests/integration/test_shaping.py")
_CHOSEN = "netem and (conformance or partition or impossible or every_impairment)"
_SUITE = ["pytest", "-p", "no:cacheprovider", "-q", "-rA", "--color=no", "--durations=20", "-k", _CHOSEN, *_FILES]


@pytest.mark.timeout(900)
def test_netem_in_a_virtual_machine(tmp_path: Path) -> None:
    """Skipped, with the reason, where no virtual machine can be had."""
    machine = [sys.executable, str(ROOT / "tests/netem/vm.py"), "--timeout", "800", "--"]
    with (tmp_path / "console").open("w+") as console:
        done = subprocess.run(
            [*machine, sys.executable, "-m", *_SUITE], stdout=console, stderr=subprocess.STDOUT, check=False
        )
        console.seek(0)
        said = console.read()
    print(said)
    if done.returncode == UNAVAILABLE:
        pytest.skip(said.strip().splitlines()[-1])
    assert done.returncode == 0
    passed = re.search(r"^(\d+) passed, ([^s]*)in ", said, re.MULTILINE)  # none skipped
    assert passed
    assert int(passed[1]) >= 10
