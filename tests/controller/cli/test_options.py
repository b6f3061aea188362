"""Options that several commands have."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from testbed_controller.cli.options import CommandGroup, first_sentence, on_hosts
from testbed_controller.hosts.placement import LabPart


def given(*arguments: str) -> object:
    seen: list[object] = []

    @click.command()
    @on_hosts
    def command(where: LabPart) -> None:
        seen.append((list(where.hosts), dict(where.place)))

    result = CliRunner().invoke(command, arguments)
    return seen[0] if seen else result.output


def test_hosts_and_places_are_read() -> None:
    found = given("--hosts", "a, b,", "--place", "worker1=b", "--place", "worker2=a")
    assert found == (["a", "b"], {"worker1": "b", "worker2": "a"})
    assert given() == ([], {})


@pytest.mark.parametrize("wrong", ["worker1", "=b", "worker1="])
def test_a_place_needs_a_device_and_a_host(wrong: str) -> None:
    assert f"'{wrong}' must be DEVICE=HOST" in str(given("--place", wrong))


def test_groups_list_whole_sentences() -> None:
    long = "Do a thing that takes more words to be described than a terminal of eighty columns has room for in a row."

    @click.group(cls=CommandGroup)
    def group() -> None:
        """Group."""

    @group.command(help=f"{long} More of it.\n\nAnd more.")
    def thing() -> None:
        pass

    shown = " ".join(CliRunner().invoke(group, ["--help"]).output.split())
    assert long.rstrip(".") in shown
    assert "More of it" not in shown
    assert first_sentence(thing).startswith("Do a thing")
