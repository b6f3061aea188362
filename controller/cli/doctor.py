"""`testbed doctor`: what this machine can serve."""

from __future__ import annotations

from dataclasses import asdict

import click

from controller.cli.options import as_json
from controller.cli.printing import dump
from testbed.common.errors import HostError


@click.command()
@click.option(
    "--measure", is_flag=True, help="Also measure how fast and how short links can be here: some seconds more."
)
@as_json
def doctor(measure: bool, as_json: bool) -> None:
    """Say what the testbed finds on this machine, and what helps where something is missing.

    With --measure, `testbed run` remembers the highest rate, and refuses a scenario that asks for more.

    Exits with 3 when no scenario could run in containers here.
    """
    from controller.lab.diagnosis import HostCheck, examine

    checks: list[HostCheck] = []
    for check in examine(measure=measure):
        checks.append(check)
        if not as_json:
            helps = f"; {check.help}" if check.help and check.status != "ok" else ""
            click.echo(f"{check.status:8} {check.name:18} {check.detail}{helps}")
    if as_json:
        dump([asdict(check) for check in checks])
    fatal = [check.name for check in checks if check.needed and check.status == "missing"]
    if fatal:
        raise HostError(
            f"no scenario can run in containers here for want of: {', '.join(fatal)}; '--runtime simulate' needs none"
        )
