"""Options that several commands have, and how groups of commands list them."""

from __future__ import annotations

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key of the scenario, dotted, as in network.link.rate=10mbit. May be repeated.",
)
links = click.option(
    "--links",
    type=click.Choice(["auto", "netem", "userspace"]),
    default="auto",
    show_default=True,
    envvar="TESTBED_LINKS",
    show_envvar=True,
    help="What shapes the links; auto takes netem where the kernel has it.",
)


_LONGEST = 300
"""Letters of a command's first sentence, at most."""


class CommandGroup(click.Group):
    """Lists its commands with their first sentences whole; click cuts them at the width."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with its sentence."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_LONGEST)) for name, each in found.items() if each])
