"""The netem backend, on a kernel that has it: the conformance suite and more, inside a virtual machine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netem.vm import LEFT_OUT, ROOT, UNAVAILABLE

_FILES = ("tests/integration/test_conformance.py", "tests/integration/test_shaping.py")
_CHOSEN = "netem and (conformance or partition or every_impairment) and not 100000000.0"
# A kernel that has neither backend is the same one without these modules. One is in use until the last namespace with a
# link of its kind is gone, and a namespace that was removed stays while a socket in it still closes.
_WITHOUT = """for module in sch_netem xt_NFQUEUE nfnetlink_queue; do
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
    _CHOSEN,
    *_FILES,
]


@pytest.mark.timeout(1600)
def test_netem_in_a_virtual_machine(tmp_path: Path) -> None:
    """Skipped, with the reason, where no virtual machine can be had."""
    # Its time is its own, so that it may leave the processors to others; and it begins first, since it takes longest.
    machine = [
        "nice",
        "-n",
        "5",
        sys.executable,
        str(ROOT / "tests/netem/vm.py"),
        "--timeout",
        "1500",
        "--",
    ]
    with (tmp_path / "console").open("w+") as console:
        suite = shlex.join([sys.executable, "-m", *_SUITE])
        script = f"{suite} || exit\n{_WITHOUT.format(python=sys.executable)}"
        done = subprocess.run(
            [*machine, "sh", "-c", script],
            stdout=console,
            stderr=subprocess.STDOUT,
            check=False,
        )
        console.seek(0)
        said = console.read()
    print(said)
    if done.returncode == UNAVAILABLE:
        pytest.skip(said.strip().splitlines()[-1])
    assert done.returncode == 0
    result = re.search(r"^(\d+) passed.*$", said, re.MULTILINE)
    assert result
    assert int(result[1]) >= 10
    assert "skipped" not in result[0]
    reason = next(line for line in said.splitlines() if "cannot shape links" in line)
    assert (
        "netem lacks sch_netem; userspace lacks nfnetlink_queue, xt_NFQUEUE" in reason
    )
    assert "modprobe" in reason
    assert "linux-image-amd64" in reason


def test_what_the_guest_runs_needs_nothing_that_it_goes_without() -> None:
    modules = [
        file.removesuffix(".py").replace("/", ".") for file in (*_FILES, "conftest.py")
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(LEFT_OUT - {'test', 'site-packages'})}))"
    code += f"; import tests.helpers.hostload, testbed_controller.shaping.capability, {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
