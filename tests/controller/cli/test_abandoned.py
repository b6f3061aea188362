"""The hint at runs whose command was killed."""

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
def test_removal_is_suggested_by_all_commands_but_the_one_that_removes(
    arguments: list[str], is_hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "orphaned_runs", lambda: ["lost"])
    monkeypatch.setattr(main.sys, "argv", ["testbed", *arguments])
    shown = CliRunner().invoke(main.testbed, arguments)
    assert shown.exit_code == 0
    assert (HINT in shown.stderr) is is_hinted


def test_completion_in_a_shell_shows_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "orphaned_runs", lambda: ["lost"])
    monkeypatch.setattr(main.sys, "argv", ["testbed"])
    completed = {
        "_TESTBED_COMPLETE": "bash_complete",
        "COMP_WORDS": "testbed do",
        "COMP_CWORD": "1",
    }
    for name, value in completed.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(main.testbed, [], prog_name="testbed")
    assert "down" in shown.stdout
    assert HINT not in shown.stderr
