"""`testbed doctor` and `testbed setup`: check this machine, build images, find hosts, measure a profile."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.common import formats
from testbed.common.errors import HostError
from testbed_controller.cli.data import fetch
from testbed_controller.cli.options import CommandGroup, as_json, on_hosts
from testbed_controller.cli.printing import dump, print_table, say

if TYPE_CHECKING:
    from testbed_controller.hosts.placement import LabPart


@click.group(cls=CommandGroup)
def setup() -> None:
    """Prepare this machine: build images, inspect hosts, download data sets, measure a device profile."""


@click.command()
@click.option(
    "--measure",
    is_flag=True,
    help="Also measure how fast and how short links can be here: some seconds more.",
)
@on_hosts
@as_json
def doctor(measure: bool, where: LabPart, as_json: bool) -> None:
    """Check this machine for the testbed's requirements, with a remedy for each problem.

    With --hosts, also whether runs can go there; `testbed setup hosts` shows more of them.

    With --measure, `testbed run` remembers the highest rate, and refuses a scenario that asks for more.

    Exits with 3 when no scenario could run in containers here.
    """
    from testbed_controller.lab.diagnosis import HostCheck, examine

    checks: list[HostCheck] = []
    diagnosis = examine(measure=measure)
    if where.hosts:
        from testbed_controller.hosts.survey import check_hosts

        diagnosis = chain(diagnosis, check_hosts(where.hosts))
    for check in diagnosis:
        checks.append(check)
        if not as_json:
            helps = f"; {check.help}" if check.help and check.status != "ok" else ""
            click.echo(f"{check.status:8} {check.name:18} {check.detail}{helps}")
    if as_json:
        dump([asdict(check) for check in checks])
    fatal = [
        check.name for check in checks if check.needed and check.status == "missing"
    ]
    if fatal:
        raise HostError(
            f"no scenario can run in containers here for want of: {', '.join(fatal)}; '--runtime simulate' needs none"
        )


@setup.command()
@as_json
@click.option(
    "--env",
    "as_env",
    is_flag=True,
    help="Print as variables for compose/, with a new random token.",
)
@click.option(
    "--prune",
    is_flag=True,
    help="Remove the testbed's images that the current files do not need.",
)
@click.option(
    "--remove",
    is_flag=True,
    help="Remove all of the testbed's images without building any.",
)
def images(as_json: bool, as_env: bool, prune: bool, remove: bool) -> None:
    """Build missing images for the current files, and list them."""
    from testbed_controller.lab.engine import connect, ensure_engine
    from testbed_controller.lab.images import (
        ensure_images,
        image_exists,
        image_size,
        remove_images,
    )

    if remove:
        for tag in remove_images(connect()):
            click.echo(f"removed {tag}")
        return
    client = ensure_engine(say)
    wanted = ensure_images(client, say)
    if prune:
        for tag in remove_images(client, keep=wanted):
            click.echo(f"removed {tag}", err=True)
    if as_env:
        click.echo(
            f"TESTBED_DEVICE_IMAGE={wanted.device}\nTESTBED_SHAPER_IMAGE={wanted.shaper}"
        )
        click.echo(f"TESTBED_TOKEN={secrets.token_urlsafe(24)}")
        return
    # What they stand on may have lost its name to the --prune of another checkout.
    rows: list[dict[str, Any]] = []
    for kind, tag in wanted.by_kind.items():
        if image_exists(client, tag):
            identity = client.images.get(tag).id
            rows.append(
                {
                    "image": kind,
                    "tag": tag,
                    "id": identity,
                    "bytes": image_size(client, tag),
                }
            )
    if as_json:
        dump(rows)
        return
    for row in rows:
        click.echo(
            f"{row['image'].replace('_', ' '):16}{row['tag']:36}{formats.size(row['bytes']):>10}"
        )


@setup.command()
@click.argument("contexts", nargs=-1)
@as_json
def hosts(contexts: tuple[str, ...], as_json: bool) -> None:
    """List the engines of docker contexts, their capabilities and missing requirements.

    CONTEXTS are those to look at, by default all there are. Clock, round trip and rate are measured over the
    connection of each context, by a container that is removed at once, where the images are there already.

    \b
    Example:
      testbed setup hosts node1 node2
    """
    from testbed_controller.hosts.survey import survey

    engines = survey(contexts)
    if as_json:
        dump([asdict(each) for each in engines])
        return
    rows = []
    for each in engines:
        node = f"{each.node} (manager)" if each.manager else each.node
        clock = (
            _format_value(each.offset, "{:+.2f} ms", 1e3),
            _format_value(each.uncertainty, "{:.2f} ms", 1e3),
        )
        memory = "" if each.memory is None else formats.size(each.memory)
        rate = "" if each.rate is None else formats.rate(each.rate)
        machine = (
            each.address,
            _format_value(each.cores, "{}"),
            memory,
            each.engine,
            ", ".join(each.images),
        )
        rows.append(
            [
                each.context,
                node,
                *machine,
                *clock,
                _format_value(each.round_trip, "{:.2f} ms", 1e3),
                rate,
            ]
        )
    titles = [
        "context",
        "node",
        "address",
        "cores",
        "memory",
        "engine",
        "images",
        "clock",
        "+-",
        "round trip",
        "rate",
    ]
    print_table(titles, rows)
    for each in engines:
        for text in each.missing:
            click.echo(
                text
                if text.startswith(f"{each.context}:")
                else f"{each.context}: {text}"
            )


def _format_value(value: float | None, form: str, factor: int | float = 1) -> str:
    """Format a value; empty for an unknown one."""
    return "" if value is None else form.format(value * factor)


@setup.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the profile to this file.",
)
@click.option(
    "--peer",
    help="Measure the link to this machine too, where `testbed setup profile --serve` runs.",
)
@click.option(
    "--serve", is_flag=True, help="Be the peer of one measurement, on port 8720."
)
@click.option(
    "--program",
    is_flag=True,
    help="Print the program that measures, for a board without the testbed.",
)
def profile(out: Path | None, peer: str | None, serve: bool, program: bool) -> None:
    """Measure this machine: training speed by kind and size of layer, memory, and the link to a peer.

    The file is a profile for `devices.<name>.profile`. A board needs Python and torch alone: what --program prints is
    run there, and takes --peer and --serve as well.

    \b
    Examples:
      testbed setup profile --out my-laptop.yaml
      testbed setup profile --program | ssh pi python3 - > my-pi.yaml
      testbed setup profile --program | ssh pi python3 - --peer 192.168.1.7 > my-pi.yaml
    """
    from testbed_controller.profiling import board

    if program:
        click.echo(Path(board.__file__).read_text(), nl=False)
        return
    try:
        if serve:
            board.serve()
            return
        text = board.profile(peer)
        if out is None:
            click.echo(text, nl=False)
        else:
            out.write_text(text)
            click.echo(f"{out}: name it as devices.<name>.profile")
    except OSError as error:
        where = f"the link to {peer}" if peer else str(out or "port 8720")
        raise HostError(f"{where}: {error.strerror or error}") from None
    except ValueError as error:
        raise HostError(str(error)) from None


setup.add_command(fetch)
