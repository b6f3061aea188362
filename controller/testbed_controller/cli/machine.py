"""`testbed doctor`, `hosts`, `images` and `bench`: what machines serve, have built, and take for the testbed itself."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import click

from testbed.common import formats
from testbed.common.errors import HostError
from testbed_controller.cli.options import as_json, on_hosts
from testbed_controller.cli.printing import dump, print_table, say

if TYPE_CHECKING:
    from testbed_controller.hosts.placement import LabPart


@click.command()
@click.option(
    "--measure", is_flag=True, help="Also measure how fast and how short links can be here: some seconds more."
)
@on_hosts
@as_json
def doctor(measure: bool, where: LabPart, as_json: bool) -> None:
    """Report what the testbed finds on this machine, and how to fix what is missing.

    With --hosts, also whether runs can go there; `testbed hosts` shows more of them.

    With --measure, `testbed run` remembers the highest rate, and refuses a scenario that asks for more.

    Exits with 3 when no scenario could run in containers here.
    """
    from testbed_controller.lab.diagnosis import HostCheck, examine

    checks: list[HostCheck] = []
    found = examine(measure=measure)
    if where.hosts:
        from testbed_controller.hosts.survey import checks as of_hosts

        found = chain(found, of_hosts(where.hosts))
    for check in found:
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


@click.command()
@as_json
@click.option("--env", "as_env", is_flag=True, help="Print as variables for compose/, with a new random token.")
@click.option("--prune", is_flag=True, help="Remove the testbed's images that the current files do not need.")
@click.option("--remove", is_flag=True, help="Remove all of the testbed's images; build nothing.")
def images(as_json: bool, as_env: bool, prune: bool, remove: bool) -> None:
    """Build the images that the current files need, unless they exist, and list them."""
    from testbed_controller.lab.engine import connect, ensure_engine
    from testbed_controller.lab.images import ensure_images, exists, image_size, remove_images

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
        click.echo(f"TESTBED_DEVICE_IMAGE={wanted.device}\nTESTBED_SHAPER_IMAGE={wanted.shaper}")
        click.echo(f"TESTBED_TOKEN={secrets.token_urlsafe(24)}")
        return
    # What they stand on may have lost its name to the --prune of another checkout.
    rows = []
    for kind, tag in vars(wanted).items():
        if exists(client, tag):
            identity = client.images.get(tag).id
            rows.append({"image": kind, "tag": tag, "id": identity, "bytes": image_size(client, tag)})
    if as_json:
        dump(rows)
        return
    for row in rows:
        click.echo(f"{row['image'].replace('_', ' '):16}{row['tag']:36}{formats.size(row['bytes']):>10}")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PART]... [--json] [--out FILE] [--compare REV]"
)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure the overhead of the testbed itself on this machine, each figure beside its target.

    clocks: speed of the simulator; the quickstart emulated against simulated. pacing: whether work takes what it is
    charged, on an idle and on a loaded host. transfer: tensors and small messages on
    real links. gloo: a step of our pipeline against torch's own over gloo and against the plan. memory: of idle and
    working devices. startup: devices up and shaped against bare containers.
    conformance: links requested and achieved, by backend. hosts: start-up on all hosts of TESTBED_HOSTS against one.
    All of these by default, a quarter of an hour. peers, if it is named: Flower's simulation and SimPy, which it
    installs into .build/peers, beside the simulator. Run it on an
    idle machine: what else runs here is in the figures. Needs a checkout of the repository.

    --json prints the figures as JSON, --out FILE writes that to a file as well. Figures are kept by revision in
    results/bench.json; --compare REV shows each over that of another revision, and marks what is a tenth worse.

    \b
    Example:
      testbed bench transfer memory --json
    """
    from testbed.common.errors import HostError
    from testbed_controller.lab.paths import ROOT

    if not (ROOT / "tools/bench").is_dir():
        raise HostError("the bench is part of a checkout: clone the repository and run 'make bench' there")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sys.exit(subprocess.call([sys.executable, "-m", "tools.bench", *arguments], env=environment))


@click.command()
@click.argument("contexts", nargs=-1)
@as_json
def hosts(contexts: tuple[str, ...], as_json: bool) -> None:
    """List the engines of docker contexts: what runs over several hosts find there, and what is missing.

    CONTEXTS are those to look at, by default all there are. Clock, round trip and rate are measured over the
    connection of each context, by a container that is removed at once, where the images are there already.

    \b
    Example:
      testbed hosts node1 node2
    """
    from testbed_controller.hosts.survey import survey

    found = survey(contexts)
    if as_json:
        dump([asdict(each) for each in found])
        return
    rows = [
        [
            each.context,
            each.node + (" (manager)" if each.manager else ""),
            each.address,
            "" if each.cores is None else str(each.cores),
            "" if each.memory is None else formats.size(each.memory),
            each.engine,
            ", ".join(each.images),
            "" if each.offset is None else f"{each.offset * 1e3:+.2f} ms",
            "" if each.uncertainty is None else f"{each.uncertainty * 1e3:.2f} ms",
            "" if each.round_trip is None else f"{each.round_trip * 1e3:.2f} ms",
            "" if each.rate is None else formats.rate(each.rate),
        ]
        for each in found
    ]
    titles = ["context", "node", "address", "cores", "memory", "engine", "images", "clock", "+-", "round trip", "rate"]
    print_table(titles, rows)
    for each in found:
        for text in each.missing:
            click.echo(f"{each.context}: {text}" if not text.startswith(f"{each.context}:") else text)
