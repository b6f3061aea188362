"""`testbed --log-level`: records on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from testbed_controller.cli.main import log_to_terminal
from tests.helpers.commands import run_command

LOGGER = logging.getLogger("testbed_controller.some.module")


@pytest.fixture(autouse=True)
def _warnings_afterwards() -> Iterator[None]:
    yield
    log_to_terminal("warning")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("warning", ["lost"]),
        ("info", ["begun", "lost"]),
        ("debug", ["sent", "begun", "lost"]),
    ],
)
def test_the_terminal_has_the_records_from_a_level_on(
    level: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_terminal(level)
    for severity, text in (
        (logging.DEBUG, "sent"),
        (logging.INFO, "begun"),
        (logging.WARNING, "lost"),
    ):
        LOGGER.log(severity, text)
    assert [
        line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()
    ] == shown


def test_control_characters_of_a_record_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_terminal("warning")
    LOGGER.warning("one\x1b[2J\ntwo")
    assert capsys.readouterr().err.endswith("one\\x1b[2J\ntwo\n")


def test_levels_are_listed_where_another_is_given() -> None:
    done = run_command("--log-level", "loud", "methods")
    assert done.returncode == 2
    assert "'debug', 'info', 'warning'" in done.stderr
    assert run_command("show", "methods").stderr == ""
