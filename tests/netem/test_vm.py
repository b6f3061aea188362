"""The netem backend on a kernel that supports it, in a virtual machine: conformance and a few tests of shaping."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netem.vm import EXCLUDED, ROOT, UNAVAILABLE

_FILES = ("tests/integration/test_conformance.py", "tests/integration/test_shaping.py")
# 100 mbit takes too many packets for the emulated processor.
_SELECTION = (
    "netem and (conformance or partition or all_impairments) and not 100000000.0"
)
# Without these modules the kernel supports neither backend. A module remains in use until the last namespace with one
# of its links is gone, and a removed namespace remains while a socket in it is closing: retry.
_WITHOUT_BACKENDS = """for module in sch_netem xt_NFQUEUE nfnetlink_queue; do
    timeout 120 sh -c "until rmmod $module; do sleep 1; done" || exit 1
done
! {python} -m testbed_controller.shaping.capability"""
_SUITE = [
    "pytest",
    "-p",
    "no:cacheprovider",
    "-q",
    "-rA",
    "--color=no",
    "--durations=20",
    "-k",
    _SELECTION,
    *_FILES,
]


@pytest.mark.timeout(1600)
def test_netem_conforms_in_virtual_machine(tmp_path: Path) -> None:
    # The guest has its own clock, so it can leave the processors to other tests.
    machine = ["nice", "-n", "5", sys.executable, str(ROOT / "tests/netem/vm.py")]
    machine += ["--timeout", "1500", "--"]
    suite = shlex.join([sys.executable, "-m", *_SUITE])
    without_backends = _WITHOUT_BACKENDS.format(python=sys.executable)
    script = f"{suite} || exit\n{without_backends}"
    with (tmp_path / "console").open("w+") as console:
        completed = subprocess.run(
            [*machine, "sh", "-c", script],
            stdout=console,
            stderr=subprocess.STDOUT,
            check=False,
        )
        console.seek(0)
        output = console.read()
    print(output)
    if completed.returncode == UNAVAILABLE:
        # The last line is the reason.
        pytest.skip(output.strip().splitlines()[-1])
    assert completed.returncode == 0
    summary = re.search(r"^(\d+) passed.*$", output, re.MULTILINE)
    assert summary
    assert int(summary[1]) >= 10
    assert "skipped" not in summary[0]
    refusal = next(line for line in output.splitlines() if "cannot shape links" in line)
    missing = "netem lacks sch_netem; userspace lacks nfnetlink_queue, xt_NFQUEUE"
    assert missing in refusal
    assert "modprobe" in refusal
    assert "linux-image-amd64" in refusal


def test_tests_of_guest_do_not_import_excluded_packages() -> None:
    files = (*_FILES, "conftest.py")
    modules = [file.removesuffix(".py").replace("/", ".") for file in files]
    modules += ["tests.helpers.hostload", "testbed_controller.shaping.capability"]
    # These two are folders, and other modules have the same names.
    packages = sorted(EXCLUDED - {"test", "site-packages"})
    # The import of a module that is None in sys.modules fails.
    code = f"import sys; sys.modules.update(dict.fromkeys({packages}))"
    code += f"; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
