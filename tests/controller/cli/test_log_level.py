"""Log records on the terminal, by `testbed --log-level`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from testbed_controller.cli.main import log_to_terminal
from tests.helpers.commands import run_command

LOGGER = logging.getLogger("testbed_controller.some.module")


@pytest.fixture(autouse=True)
def _restore_level() -> Iterator[None]:
    yield
    # The level holds for the whole process and other tests.
    log_to_terminal("warning")


@pytest.mark.parametrize(
    ("level", "messages"),
    [
        ("warning", ["lost"]),
        ("info", ["begun", "lost"]),
        ("debug", ["sent", "begun", "lost"]),
    ],
)
def test_records_below_level_are_not_printed(
    level: str, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_terminal(level)
    for severity, text in (
        (logging.DEBUG, "sent"),
        (logging.INFO, "begun"),
        (logging.WARNING, "lost"),
    ):
        LOGGER.log(severity, text)
    # Lines begin with the level and the logger.
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == messages


def test_control_characters_of_record_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_terminal("warning")
    # \x1b[2J would clear the terminal.
    LOGGER.warning("one\x1b[2J\ntwo")
    assert capsys.readouterr().err.endswith("one\\x1b[2J\ntwo\n")


def test_unknown_level_is_refused_with_list_of_levels() -> None:
    result = run_command("--log-level", "loud", "methods")
    assert result.returncode == 2
    assert "'debug', 'info', 'warning'" in result.stderr
    assert run_command("show", "methods").stderr == ""
