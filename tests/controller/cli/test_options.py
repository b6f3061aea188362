"""Options shared by several commands."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from testbed_controller.cli.options import CommandGroup, first_sentence, on_hosts
from testbed_controller.hosts.placement import LabPart


def parse_options(*arguments: str) -> object:
    parsed: list[object] = []

    @click.command()
    @on_hosts
    def command(where: LabPart) -> None:
        parsed.append((list(where.hosts), dict(where.place)))

    result = CliRunner().invoke(command, arguments)
    return parsed[0] if parsed else result.output


def test_hosts_and_places_are_parsed() -> None:
    places = ("--place", "worker1=b", "--place", "worker2=a")
    # Spaces and a last comma are ignored.
    options = parse_options("--hosts", "a, b,", *places)
    assert options == (["a", "b"], {"worker1": "b", "worker2": "a"})
    assert parse_options() == ([], {})


@pytest.mark.parametrize("text", ["worker1", "=b", "worker1="])
def test_place_needs_device_and_host(text: str) -> None:
    assert f"'{text}' must be DEVICE=HOST" in str(parse_options("--place", text))


def test_group_lists_complete_first_sentences_of_commands() -> None:
    # click alone would end a long sentence with dots.
    long = "Do a thing that takes more words to be described than a terminal of eighty columns has room for in a row."

    @click.group(cls=CommandGroup)
    def group() -> None:
        """Group."""

    @group.command(help=f"{long} More of it.\n\nAnd more.")
    def thing() -> None:
        pass

    help_text = " ".join(CliRunner().invoke(group, ["--help"]).output.split())
    assert long.rstrip(".") in help_text
    assert "More of it" not in help_text
    assert first_sentence(thing).startswith("Do a thing")
