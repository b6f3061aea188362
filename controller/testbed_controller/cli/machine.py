"""`testbed doctor` and `testbed setup`: check this machine, build images, inspect hosts, measure a profile."""

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
from testbed_controller.cli.options import CommandGroup, json_option, on_hosts
from testbed_controller.cli.printing import dump, print_table, say

if TYPE_CHECKING:
    from testbed_controller.hosts.placement import LabPart
    from testbed_controller.hosts.survey import HostReport
    from testbed_controller.lab.diagnosis import HostCheck


@click.group(cls=CommandGroup)
def setup() -> None:
    """Prepare this machine: build images, inspect hosts, download data sets, measure a device profile."""


@click.command()
@click.option(
    "--measure",
    is_flag=True,
    help="Also measure the highest rate and shortest delay of links on this machine (takes some seconds).",
)
@on_hosts
@json_option
def doctor(measure: bool, where: LabPart, as_json: bool) -> None:
    """Check this machine for the testbed's requirements, with a remedy for each problem.

    With --hosts, the hosts are checked as well; `testbed setup hosts` shows more about each of them.

    With --measure, the highest rate is kept for `testbed run`, which rejects scenarios with faster links.

    The exit status is 3 if no scenario can run in containers on this machine.
    """
    from testbed_controller.lab.diagnosis import examine

    checks: list[HostCheck] = []
    diagnosis = examine(measure=measure)
    if where.hosts:
        from testbed_controller.hosts.survey import check_hosts

        diagnosis = chain(diagnosis, check_hosts(where.hosts))
    # The checks are lazy and some take seconds, so each is printed as soon as its result is known.
    for check in diagnosis:
        checks.append(check)
        if not as_json:
            click.echo(_format_check(check))
    if as_json:
        dump([asdict(check) for check in checks])
    missing = []
    for check in checks:
        if check.needed and check.status == "missing":
            missing.append(check.name)
    if missing:
        raise HostError(
            f"scenarios cannot run in containers on this machine without: {', '.join(missing)}; "
            "'--runtime simulate' needs no containers"
        )


def _format_check(check: HostCheck) -> str:
    line = f"{check.status:8} {check.name:18} {check.detail}"
    if check.help and check.status != "ok":
        return f"{line}; {check.help}"
    return line


@setup.command()
@json_option
@click.option(
    "--env",
    "as_env",
    is_flag=True,
    help="Print the image names as variables for compose/, with a new random token.",
)
@click.option(
    "--prune",
    is_flag=True,
    help="Also remove images of the testbed that the current files no longer need.",
)
@click.option(
    "--remove",
    is_flag=True,
    help="Remove all of the testbed's images without building any.",
)
def images(as_json: bool, as_env: bool, prune: bool, remove: bool) -> None:
    """Build missing images for the current files, and list all current images."""
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
    current_images = ensure_images(client, say)
    if prune:
        for tag in remove_images(client, keep=current_images):
            click.echo(f"removed {tag}", err=True)
    if as_env:
        click.echo(f"TESTBED_DEVICE_IMAGE={current_images.device}")
        click.echo(f"TESTBED_SHAPER_IMAGE={current_images.shaper}")
        click.echo(f"TESTBED_TOKEN={secrets.token_urlsafe(24)}")
        return
    rows: list[dict[str, Any]] = []
    for kind, tag in current_images.by_kind.items():
        # The --prune of another checkout may have removed the tags of base images, whose layers remain in use.
        if image_exists(client, tag):
            image_id = client.images.get(tag).id
            size = image_size(client, tag)
            rows.append({"image": kind, "tag": tag, "id": image_id, "bytes": size})
    if as_json:
        dump(rows)
        return
    for row in rows:
        kind = row["image"].replace("_", " ")
        click.echo(f"{kind:16}{row['tag']:36}{formats.size(row['bytes']):>10}")


@setup.command()
@click.argument("contexts", nargs=-1)
@json_option
def hosts(contexts: tuple[str, ...], as_json: bool) -> None:
    """List the engines of Docker contexts, their capabilities and missing requirements.

    CONTEXTS names the Docker contexts to inspect (default: all). Clock offset, round trip and rate are measured over
    the connection of each context, by a short-lived container; engines without the testbed's images are not measured.

    \b
    Example:
      testbed setup hosts node1 node2
    """
    from testbed_controller.hosts.survey import survey

    engines = survey(contexts)
    if as_json:
        dump([asdict(each) for each in engines])
        return
    header: list[str] = []
    rows = []
    for each in engines:
        columns = _engine_columns(each)
        header = list(columns)
        rows.append(list(columns.values()))
    print_table(header, rows)
    for each in engines:
        prefix = f"{each.context}: "
        for text in each.missing:
            # Some errors name the context already.
            click.echo(prefix + text.removeprefix(prefix))


def _engine_columns(engine: HostReport) -> dict[str, str]:
    """Return the cells of an engine by column title; empty for unknown values."""
    return {
        "context": engine.context,
        "node": f"{engine.node} (manager)" if engine.manager else engine.node,
        "address": engine.address,
        "cores": "" if engine.cores is None else str(engine.cores),
        "memory": "" if engine.memory is None else formats.size(engine.memory),
        "engine": engine.engine,
        "images": ", ".join(engine.images),
        "clock": _format_milliseconds(engine.offset, "+.2f"),
        "+-": _format_milliseconds(engine.uncertainty),
        "round trip": _format_milliseconds(engine.round_trip),
        "rate": "" if engine.rate is None else formats.rate(engine.rate),
    }


def _format_milliseconds(seconds: float | None, number_format: str = ".2f") -> str:
    return "" if seconds is None else f"{seconds * 1e3:{number_format}} ms"


@setup.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the profile to this file.",
)
@click.option(
    "--peer",
    help="Also measure the link to this machine, on which `testbed setup profile --serve` runs.",
)
@click.option(
    "--serve", is_flag=True, help="Serve as the peer of one measurement, on port 8720."
)
@click.option(
    "--program",
    is_flag=True,
    help="Print the measuring program, for a board without the testbed.",
)
def profile(out: Path | None, peer: str | None, serve: bool, program: bool) -> None:
    """Measure this machine: training speed by kind and size of layer, memory, and the link to a peer.

    The result is a profile file for `devices.<name>.profile`. A board needs only Python and torch: the program that
    --program prints runs there, and accepts --peer and --serve as well.

    \b
    Examples:
      testbed setup profile --out my-laptop.yaml
      testbed setup profile --program | ssh pi python3 - > my-pi.yaml
      testbed setup profile --program | ssh pi python3 - --peer 192.168.1.7 > my-pi.yaml
    """
    from testbed_controller.profiling import board

    # The module imports nothing of the testbed, so its source text is the program.
    if program:
        click.echo(Path(board.__file__).read_text(), nl=False)
        return
    try:
        if serve:
            board.serve_peer()
            return
        text = board.measure_profile(peer)
        if out is None:
            click.echo(text, nl=False)
        else:
            out.write_text(text)
            click.echo(f"{out}: written; use the path as devices.<name>.profile")
    except OSError as error:
        where = f"the link to {peer}" if peer else str(out or "port 8720")
        raise HostError(f"{where}: {error.strerror or error}") from None
    except ValueError as error:
        raise HostError(str(error)) from None


setup.add_command(fetch)
