"""Options that several commands have."""

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
