"""`testbed exec`: a command in a device's container."""

from __future__ import annotations

import sys

import click


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("device")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--run", help="Which run; may be left out when there is only one.")
def execute(device: str, command: tuple[str, ...], run: str | None) -> None:
    """Run COMMAND in the container of DEVICE, and end with its status.

    Other devices are known by their names, over the shaped links.

    \b
    Examples:
      testbed exec worker1 -- python3 -c "import socket; print(socket.gethostbyname('source'))"
      testbed exec --run quickstart-1a2b3c4d worker1 -- cat /etc/hosts
    """
    from docker.errors import APIError, NotFound

    from controller.lab import runstate
    from controller.lab.containers import container_name
    from controller.lab.engine import connect
    from testbed.errors import InputError, TestbedError

    client, chosen = connect(), runstate.choose(run)
    try:
        started = client.api.exec_create(container_name(chosen, device), list(command))["Id"]
    except NotFound:
        raise InputError(f"there is no device '{device}' in {chosen}: see 'testbed ps'") from None
    except APIError as error:
        raise TestbedError(f"{device}: {error.explanation}") from None
    for output, errors in client.api.exec_start(started, stream=True, demux=True):
        for part, stream in ((output, sys.stdout), (errors, sys.stderr)):
            stream.buffer.write(part or b"")
            stream.flush()
    sys.exit(client.api.exec_inspect(started)["ExitCode"])
