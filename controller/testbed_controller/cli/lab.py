"""`testbed up`, `down`, `ps`, `logs`, `exec` and `watch`: create, inspect and remove labs."""

from __future__ import annotations

import fnmatch
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.common.errors import HostError, InputError, TestbedError
from testbed_controller.cli.options import (
    json_option,
    links_option,
    on_hosts,
    overrides_option,
    run_option,
)
from testbed_controller.cli.printing import dump, print_table, say
from testbed_controller.lab import runstate

if TYPE_CHECKING:
    from docker import DockerClient

    from testbed_controller.hosts.placement import LabPart
    from testbed_controller.lab.containers import ListedContainer
    from testbed_controller.results.files import Progress


STDERR_STREAM = 2
"""Number of standard error in the frames in which the engine sends the output of a command."""
INPUT_BLOCK = 1 << 16
"""Maximum number of bytes of standard input forwarded at once."""


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path))
@overrides_option
@links_option
@on_hosts
@json_option
def up(
    scenario: Path,
    overrides: tuple[str, ...],
    links: str,
    where: LabPart,
    as_json: bool,
) -> None:
    """Create the devices and links of SCENARIO and keep them running without a workload.

    For a sweep, the first point is used. `testbed run SCENARIO --on` runs a scenario on this lab, and `testbed exec` a
    command on one of its devices; `fault`, `link`, `ps` and `logs` work on a lab as on a run. `testbed down` removes
    the lab.
    """
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load
    from testbed_controller.hosts.lab import create_lab

    trial = trials(load(scenario, overrides))[0]
    lab = create_lab(trial, where, links=links, progress=say, keep=True)
    if as_json:
        devices = [asdict(device) for device in lab.devices.values()]
        dump({"run": lab.run_id, "subnet": lab.subnet, "devices": devices})
        return
    click.echo(f"run {lab.run_id} is up on {lab.subnet}")
    rows = []
    for each in lab.devices.values():
        rows.append([each.name, each.state, each.address, each.control_url])
    print_table(["device", "state", "address", "control"], rows)
    click.echo(f"remove it with: testbed down {lab.run_id}")


@click.command()
@click.argument("run", required=False)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Remove all of your runs, and the abandoned runs of all users.",
)
@click.option(
    "--everyone",
    is_flag=True,
    help="Also remove runs of other users that are in progress.",
)
def down(run: str | None, everything: bool, everyone: bool) -> None:
    """Remove a run: its containers, networks and state, including remains of an incomplete removal.

    RUN may be a pattern such as 'quickstart-*'; without RUN, the only run is removed. Missing parts are ignored; a run
    without any remains ends with exit status 2.

    A run of another user (or of another state folder) is removed if RUN is its full name, if the run is abandoned (no
    container is running), or with --everyone.
    """
    if everything and run:
        raise InputError("RUN and --all cannot be combined")
    pattern = "*" if everything or (everyone and run is None) else runstate.choose(run)
    engines, removable = _removable_runs(pattern)
    known_runs = sorted({*engines, *runstate.runs()})
    matches = fnmatch.filter(known_runs, pattern)
    own_runs = []
    runs_of_others = []
    for each in matches:
        if each in removable:
            own_runs.append(each)
        else:
            runs_of_others.append(each)
    selected = matches if everyone else own_runs
    if pattern != "*":
        _check_selection(pattern, known_runs, selected, runs_of_others)
    if runs_of_others and everyone:
        click.echo(f"removing the runs of other users: {', '.join(runs_of_others)}")
    _remove_runs(selected, engines)
    if runs_of_others and not everyone:
        names = ", ".join(runs_of_others)
        click.echo(
            f"kept, since they belong to other users: {names} (--everyone removes them as well)"
        )


def _remove_runs(runs: Sequence[str], engines: Mapping[str, DockerClient]) -> None:
    from testbed_controller.hosts.removal import remove

    for run in runs:
        count = remove(run, engines.get(run))
        click.echo(f"{run}: removed {count} containers and networks")
    if not runs:
        click.echo("nothing to remove")


def _check_selection(
    pattern: str,
    known_runs: Sequence[str],
    selected: Sequence[str],
    runs_of_others: Sequence[str],
) -> None:
    """Raise InputError if no run matches the pattern, or only runs of other users do."""
    if selected:
        return
    if runs_of_others:
        names = ", ".join(runs_of_others)
        raise InputError(
            f"the runs {names} belong to other users: write a name in full, or add --everyone"
        )
    names = ", ".join(known_runs) or "none"
    raise InputError(f"unknown run '{pattern}' (runs: {names})")


def _removable_runs(pattern: str) -> tuple[dict[str, DockerClient], set[str]]:
    """Return the engine of each run in containers, and the names of runs removable without --everyone."""
    from testbed_controller.lab.engine import connect_to_all
    from testbed_controller.lab.removal import abandoned_runs, labelled_runs

    engines: dict[str, DockerClient] = {}
    # A run of another user is removable by its full name, which the pattern then equals.
    removable = {pattern, *runstate.runs()}
    for client in connect_to_all().values():
        engines |= dict.fromkeys(labelled_runs(client), client)
        removable |= abandoned_runs(client)
    return engines, removable


@click.command()
@json_option
def ps(as_json: bool) -> None:
    """List the containers of every run, with the activity of each device and the progress of the run.

    Your runs on engines that you used before are included.
    """
    from testbed_controller.results.files import Progress, progress

    labs = _running_labs()
    if as_json:
        runs = {}
        for run, containers in labs.items():
            runs[run] = [asdict(each) for each in containers]
        dump(runs)
        return
    if not labs:
        click.echo("no run is up")
        return
    rows = []
    progress_lines = []
    for run, containers in labs.items():
        # None for a lab without a run, and for a run of another user.
        folder = runstate.results_of(run)
        current = Progress()
        if folder is not None:
            current = progress(folder)
            progress_lines.append(f"{run}: {current}, in {folder}")
        rows += _container_rows(run, containers, current)
    header = ["run", "device", "state", "since", "activity", "address", "control"]
    print_table(header, rows)
    for line in progress_lines:
        click.echo(line)


def _container_rows(
    run: str, containers: Sequence[ListedContainer], current: Progress
) -> list[list[str]]:
    if not containers:
        return [[run, "", "networks only", "", "", "", ""]]
    rows = []
    for each in containers:
        activity = current.activities.get(each.name, "")
        row = [run, each.name, each.state, each.since, activity]
        rows.append([*row, each.address, each.control_url])
    return rows


def _running_labs() -> dict[str, list[ListedContainer]]:
    """Return the containers of each run, on the user's engines and on the hosts of distributed runs."""
    from testbed_controller.hosts.contexts import reach
    from testbed_controller.lab.containers import running_labs
    from testbed_controller.lab.engine import connect_to_all

    labs: dict[str, list[ListedContainer]] = {}
    for client in connect_to_all().values():
        labs |= running_labs(client)
    for run in runstate.runs():
        for host in runstate.hosts_of(run):
            # The run itself reports a lost host; the list shows the remaining ones.
            with suppress(HostError):
                containers = running_labs(reach(host).client).get(run, [])
                labs.setdefault(run, []).extend(containers)
    return labs


@click.command()
@click.argument("device")
@run_option
@click.option(
    "--follow", "-f", is_flag=True, help="Print new output until the container ends."
)
def logs(device: str, run_id: str | None, follow: bool) -> None:
    """Print the log of DEVICE with the output of its program (`shaper` for the container that shapes links)."""
    from testbed_controller.hosts.lab import engine_of
    from testbed_controller.lab.containers import container_logs

    run = runstate.choose(run_id)
    has_output = False
    for block in container_logs(engine_of(run, device), run, device, follow=follow):
        # Bytes, since a program may print anything; flushed, since --follow is read while the program runs.
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
        has_output = True
    if not has_output:
        say(f"{device} has no output")


@click.command(
    "exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("device")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "-i",
    "--input",
    "pass_input",
    is_flag=True,
    help="Forward standard input to the command, such as a file.",
)
@run_option
def execute(
    device: str, command: tuple[str, ...], run_id: str | None, pass_input: bool
) -> None:
    """Run COMMAND in the container of DEVICE and exit with its status.

    Other devices can be reached by their names, over the shaped links.

    \b
    Examples:
      testbed exec worker1 -- python3 -c "import socket; print(socket.gethostbyname('source'))"
      testbed exec -i worker1 -- sh -c "cat > /tmp/in.csv" < in.csv
      testbed exec worker1 -- cat /tmp/out.csv > out.csv
      testbed exec --run quickstart-1a2b3c4d worker1 -- cat /etc/hosts
    """
    from docker.errors import APIError, NotFound

    from testbed_controller.hosts.lab import engine_of
    from testbed_controller.lab.containers import container_name

    # click keeps the `--` that ends its own options as the first word of an unprocessed command.
    words = list(command[1:] if command[0] == "--" else command)
    run = runstate.choose(run_id)
    client = engine_of(run, device)
    container = container_name(run, device)
    try:
        created = client.api.exec_create(container, words, stdin=pass_input)
    except NotFound:
        raise InputError(
            f"unknown device '{device}' in {run}: see 'testbed ps'"
        ) from None
    except APIError as error:
        raise TestbedError(f"{device}: {error.explanation}") from None
    exec_id = created["Id"]
    input_file = sys.stdin.fileno() if pass_input else None
    for number, output in _output_frames(client, exec_id, input_file):
        stream = sys.stderr if number == STDERR_STREAM else sys.stdout
        stream.buffer.write(output)
        stream.flush()
    sys.exit(client.api.exec_inspect(exec_id)["ExitCode"])


def _output_frames(
    client: DockerClient, exec_id: str, input_file: int | None
) -> Iterator[tuple[int, bytes]]:
    """Start a command and yield the output as (number of the stream, bytes).

    ``exec_id`` is the engine's name of the command. If ``input_file`` is a file descriptor, the command reads from it.
    """
    from docker.utils import socket as docker_socket

    # The engine's client wraps the connection in a read-only file, so input is written to the socket below it.
    connection: Any = client.api.exec_start(exec_id, socket=True)

    def forward_input(input_file: int) -> None:
        # A command that ends without reading all input closes the connection.
        with suppress(OSError):
            # `sys.stdin` has a lock, which a thread that waits for input would still hold as the interpreter exits.
            while block := os.read(input_file, INPUT_BLOCK):
                connection._sock.sendall(block)
            connection._sock.shutdown(socket.SHUT_WR)

    if input_file is not None:
        threading.Thread(target=forward_input, args=(input_file,), daemon=True).start()
    read_frames: Any = docker_socket.frames_iter
    yield from read_frames(connection, tty=False)


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--pace",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of the run to show per second.  [default for results: 1, real time]",
)
@click.option(
    "--open/--no-open",
    "show_page",
    default=True,
    help="Open the page in a browser.  [default: open]",
)
def watch(run: str | None, pace: float | None, show_page: bool) -> None:
    """Show RUN on a page in the browser: devices, links, learning curves, activity, and faults.

    RUN is the name of a run in progress (default: the only one), or a results folder, which is replayed at --pace.
    Faults can be injected into a run in progress from the page. The page is served on 127.0.0.1 until Ctrl-C.

    \b
    Examples:
      testbed watch
      testbed watch results/quickstart --pace 5
    """
    from testbed_controller.running.control import strike
    from testbed_controller.watch.server import PageServer

    if run is not None and Path(run).is_dir():
        server = PageServer(Path(run), pace=pace or 1.0)
    else:
        state = runstate.read(runstate.choose(run))
        if state.results is None:
            raise InputError(
                f"{state.run} is a lab without a run: start one with 'testbed run SCENARIO --on'"
            )
        server = PageServer(Path(state.results), partial(strike, state.run), pace)
    click.echo(server.address)
    if show_page:
        server.show()
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    server.close()
