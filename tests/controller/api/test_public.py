"""The public Python interface: its names, documentation and examples."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import testbed
from testbed_controller import api
from tests.helpers import ROOT

ERRORS = {"InputError", "TestbedError"}
WITH_EXAMPLE = sorted(set(testbed.__all__) - ERRORS)
"""The errors have none: scenarios and programs do not make them."""


def examples_of(name: str) -> list[doctest.DocTest]:
    thing = getattr(testbed, name)
    finder = doctest.DocTestFinder(recurse=False)
    return [each for each in finder.find(thing, name, globs={}) if each.examples]


def test_testbed_has_the_names_of_the_interface() -> None:
    assert testbed.__all__ == api.__all__
    assert set(testbed.__all__) <= set(dir(testbed))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = testbed.simulat  # type: ignore[attr-defined]


def test_importing_testbed_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import testbed; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "testbed" in loaded
    assert not loaded & {"testbed_controller", "torch", "numpy", "docker", "pydantic"}


def test_the_interface_is_absent_where_the_controller_is_not_installed() -> None:
    # None in `sys.modules` is a package that cannot be found, as on a device.
    program = (
        "import sys; sys.modules['testbed_controller'] = None; import testbed\n"
        "assert not hasattr(testbed, 'run')\n"
        "testbed.run"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "AttributeError: testbed.run needs the package testbed_controller" in (
        done.stderr
    )


def test_a_missing_library_of_the_interface_is_named() -> None:
    program = (
        "import sys; sys.modules['pydantic'] = None; import testbed\n"
        "hasattr(testbed, 'run')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "ModuleNotFoundError: import of pydantic halted" in done.stderr


def test_loading_a_scenario_imports_no_torch() -> None:
    program = "import sys, testbed; testbed.load('quickstart'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)


@pytest.mark.parametrize("name", testbed.__all__)
def test_the_page_lists_every_public_name(name: str) -> None:
    assert f"`{name}" in (ROOT / "docs" / "python.md").read_text()


@pytest.mark.parametrize("name", ["Result", "Results", "Live", "Callback"])
def test_the_page_lists_every_public_member_of_a_class(name: str) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    members = [each for each in vars(getattr(testbed, name)) if each[0] != "_"]
    assert members
    assert [each for each in members if f"`{each}" not in page] == []


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_example_of_a_public_name_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples: list[Any] = examples_of(name)
    assert examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in examples:
        runner.run(example)
    assert runner.summarize().failed == 0
