"""The hint at runs with a killed command and remaining containers."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from testbed_controller.cli import main

HINT = "testbed: the run lost was killed, and its containers remain"


@pytest.mark.parametrize(
    ("arguments", "is_hinted"),
    [
        (["show", "--help"], True),
        (["down", "--help"], False),
        (["--log-level", "warning", "down", "--help"], False),
    ],
)
def test_hint_is_shown_by_all_commands_except_down(
    arguments: list[str], is_hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "orphaned_runs", lambda: ["lost"])
    # The hint is decided before the arguments are parsed.
    monkeypatch.setattr(main.sys, "argv", ["testbed", *arguments])
    result = CliRunner().invoke(main.testbed, arguments)
    assert result.exit_code == 0
    assert (HINT in result.stderr) is is_hinted


def test_shell_completion_shows_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "orphaned_runs", lambda: ["lost"])
    monkeypatch.setattr(main.sys, "argv", ["testbed"])
    # Variables that click's completion script of bash sets.
    variables = {
        "_TESTBED_COMPLETE": "bash_complete",
        "COMP_WORDS": "testbed do",
        "COMP_CWORD": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main.testbed, [], prog_name="testbed")
    assert "down" in result.stdout
    assert HINT not in result.stderr
