"""The public Python interface: its names, documentation and examples."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import testbed
from testbed_controller import api
from tests.helpers import ROOT

ERRORS = {"InputError", "TestbedError"}
NAMES_WITH_EXAMPLE = sorted(set(testbed.__all__) - ERRORS)
"""Errors have no examples, since users do not create errors."""


def examples_of(name: str) -> list[doctest.DocTest]:
    documented = getattr(testbed, name)
    finder = doctest.DocTestFinder(recurse=False)
    doctests = finder.find(documented, name, globs={})
    return [test for test in doctests if test.examples]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter without earlier imports."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


def test_testbed_has_the_names_of_the_interface() -> None:
    assert testbed.__all__ == api.__all__
    assert set(testbed.__all__) <= set(dir(testbed))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = testbed.simulat  # type: ignore[attr-defined]


def test_importing_testbed_imports_no_other_package() -> None:
    # Agents import the package, too, on devices without the controller.
    outcome = run_python(
        "import sys; before = set(sys.modules); import testbed; print(*set(sys.modules) - before)"
    )
    assert outcome.returncode == 0, outcome.stderr
    loaded = {name.partition(".")[0] for name in outcome.stdout.split()}
    assert "testbed" in loaded
    assert not loaded & {"testbed_controller", "torch", "numpy", "docker", "pydantic"}


def test_interface_is_absent_without_the_controller() -> None:
    # With None in `sys.modules` an import fails, as on a device, where the controller is not installed.
    outcome = run_python(
        "import sys; sys.modules['testbed_controller'] = None; import testbed\n"
        "assert not hasattr(testbed, 'run')\n"
        "testbed.run"
    )
    error = "AttributeError: testbed.run needs the package testbed_controller"
    assert error in outcome.stderr


def test_missing_library_of_the_interface_is_named() -> None:
    outcome = run_python(
        "import sys; sys.modules['pydantic'] = None; import testbed\n"
        "hasattr(testbed, 'run')"
    )
    assert "ModuleNotFoundError: import of pydantic halted" in outcome.stderr


def test_loading_a_scenario_imports_no_torch() -> None:
    outcome = run_python(
        "import sys, testbed; testbed.load('quickstart'); sys.exit('torch' in sys.modules)"
    )
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("name", testbed.__all__)
def test_documentation_lists_every_public_name(name: str) -> None:
    assert f"`{name}" in (ROOT / "docs" / "python.md").read_text()


@pytest.mark.parametrize("name", ["Result", "Results", "Live", "Callback"])
def test_documentation_lists_every_public_member_of_a_class(name: str) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    public_class = getattr(testbed, name)
    members = [member for member in vars(public_class) if member[0] != "_"]
    assert members
    assert [member for member in members if f"`{member}" not in page] == []


@pytest.mark.parametrize("name", NAMES_WITH_EXAMPLE)
def test_example_of_a_public_name_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some examples write results into the current folder.
    monkeypatch.chdir(tmp_path)
    examples = examples_of(name)
    assert examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in examples:
        runner.run(example)
    assert runner.summarize().failed == 0
