"""`testbed up`, `down`, `ps` and `logs`: standing labs, and what is left of any run."""

from __future__ import annotations

import fnmatch
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.cli.options import as_json, links, on_hosts, overrides, run_option
from controller.cli.printing import dump, print_table, say

if TYPE_CHECKING:
    from controller.hosts.labfile import LabPart
    from controller.lab.lab import LinkBackend


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@overrides
@links
@on_hosts
@as_json
def up(
    scenario: Path,
    overrides: tuple[str, ...],
    links: LinkBackend,
    where: LabPart,
    as_json: bool,
) -> None:
    """Create the devices and links of SCENARIO and leave them up, with nothing running on them.

    For a sweep, the first point is used. `testbed start` runs a scenario on it, `exec` a command on a device; `fault`,
    `link`, `ps` and `logs` work on it; `testbed down` ends it.
    """
    from controller.hosts.lab import AnyLab, HostsLab
    from controller.lab.lab import Lab
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load

    trial = trials(load(scenario, overrides))[0]
    lab: AnyLab
    if where.hosts:
        lab = HostsLab.create(trial, where.hosts, where.place, links=links, progress=say, keep=True)
    else:
        lab = Lab.create(trial, links=links, progress=say, keep=True)
    if as_json:
        devices = [asdict(device) for device in lab.devices.values()]
        dump({"run": lab.run_id, "subnet": lab.subnet, "devices": devices})
        return
    click.echo(f"run {lab.run_id} is up on {lab.subnet}")
    rows = [[each.name, each.state, each.address, each.control_url] for each in lab.devices.values()]
    print_table(["device", "state", "address", "control"], rows)
    click.echo(f"end it with: testbed down {lab.run_id}")


@click.command()
@click.argument("run", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove whatever any run has left on the engine.")
def down(run: str | None, everything: bool) -> None:
    """Remove a run: its containers, networks and state, even if only part of it is left.

    RUN may be a pattern such as 'quickstart-*'; without RUN it is the only one there is. What is already gone is no
    error; a run of which nothing is left ends with 2.
    """
    from controller.hosts.removal import remove
    from controller.lab import runstate
    from controller.lab.engine import connect
    from controller.lab.removal import labelled_runs
    from testbed.common.errors import InputError

    if everything and run:
        raise InputError("name a run or say --all, not both")
    pattern = "*" if everything else runstate.choose(run)
    client = connect()
    known = sorted({*labelled_runs(client), *runstate.runs()})
    meant = fnmatch.filter(known, pattern)
    if not meant and not everything:
        raise InputError(f"there is no run '{pattern}' (runs: {', '.join(known) or 'none'})")
    for each in meant:
        count = remove(each, client)
        click.echo(f"{each}: removed {count} containers and networks")
    if not meant:
        click.echo("nothing to remove")


@click.command()
@as_json
def ps(as_json: bool) -> None:
    """List the containers of every run on the engine, what each device does, and how far the run has come."""
    from controller.hosts.contexts import reach
    from controller.lab import runstate
    from controller.lab.containers import running_labs
    from controller.lab.engine import connect
    from controller.results.progress import Progress, progress
    from testbed.common.errors import HostError

    labs = running_labs(connect())
    for run in runstate.runs():
        for host in runstate.hosts_of(run):
            with suppress(HostError):  # a host that is lost: the run says so itself
                labs.setdefault(run, []).extend(running_labs(reach(host).client).get(run, []))
    if as_json:
        dump({run: [asdict(each) for each in containers] for run, containers in labs.items()})
        return
    folders = {run: runstate.results_of(run) for run in labs}
    now = {run: Progress() if folder is None else progress(folder) for run, folder in folders.items()}
    rows = [
        [run, each.name, each.state, each.since, now[run].doing.get(each.name, ""), each.address, each.control_url]
        for run, containers in labs.items()
        for each in containers
    ]
    rows += [[run, "", "networks only", "", "", "", ""] for run, containers in labs.items() if not containers]
    if rows:
        print_table(["run", "device", "state", "since", "does", "address", "control"], rows)
        for run, folder in folders.items():
            if folder is not None:
                click.echo(f"{run}: {now[run]}, in {folder}")
    else:
        click.echo("no run is up")


@click.command()
@click.argument("device")
@run_option
@click.option("--follow", "-f", is_flag=True, help="Go on until the container ends.")
def logs(device: str, run_id: str | None, follow: bool) -> None:
    """Print what the program of DEVICE has written (`shaper` for the one that shapes the links)."""
    from controller.hosts.lab import engine_of
    from controller.lab import runstate
    from controller.lab.containers import container_logs

    wrote, run = False, runstate.choose(run_id)
    for piece in container_logs(engine_of(run, device), run, device, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        wrote = True
    if not wrote:
        say(f"{device} has written nothing")
