"""`testbed exec`: a command in a device's container."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from controller.cli.options import run_option

if TYPE_CHECKING:
    from docker import DockerClient

ERRORS = 2
"""Number of the stream of standard error, in the engine's frames."""
PIECE = 1 << 16
"""Bytes of standard input that are passed on at once."""


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("device")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-i", "--input", "pass_input", is_flag=True, help="Pass the standard input on, such as a file.")
@run_option
def execute(device: str, command: tuple[str, ...], run_id: str | None, pass_input: bool) -> None:
    """Run COMMAND in the container of DEVICE, and exit with its status.

    Other devices can be reached by their names, over the shaped links.

    \b
    Examples:
      testbed exec worker1 -- python3 -c "import socket; print(socket.gethostbyname('source'))"
      testbed exec -i worker1 -- sh -c "cat > /tmp/in.csv" < in.csv
      testbed exec worker1 -- cat /tmp/out.csv > out.csv
      testbed exec --run quickstart-1a2b3c4d worker1 -- cat /etc/hosts
    """
    from docker.errors import APIError, NotFound

    from controller.hosts.lab import engine_of
    from controller.lab import runstate
    from controller.lab.containers import container_name
    from testbed.common.errors import InputError, TestbedError

    # What stands behind DEVICE is not click's to read, the sign that says so included.
    words = list(command[1:] if command[0] == "--" else command)
    chosen = runstate.choose(run_id)
    client = engine_of(chosen, device)
    try:
        started = client.api.exec_create(container_name(chosen, device), words, stdin=pass_input)["Id"]
    except NotFound:
        raise InputError(f"there is no device '{device}' in {chosen}: see 'testbed ps'") from None
    except APIError as error:
        raise TestbedError(f"{device}: {error.explanation}") from None
    for number, part in _frames(client, started, sys.stdin.fileno() if pass_input else None):
        stream = sys.stderr if number == ERRORS else sys.stdout
        stream.buffer.write(part)
        stream.flush()
    sys.exit(client.api.exec_inspect(started)["ExitCode"])


def _frames(client: DockerClient, started: str, given: int | None) -> Iterator[tuple[int, bytes]]:
    """Start a command, pass on what can be read of ``given``, and yield (stream, bytes) of what it writes."""
    from docker.utils import socket as frames

    # The engine's client wraps the connection as a file to be read; what is written goes past that.
    connection: Any = client.api.exec_start(started, socket=True)

    def feed(source: int) -> None:
        with suppress(OSError):  # the command has ended, and left the rest unread
            # Not through `sys.stdin`, whose lock a thread that waits for more would keep as the interpreter ends.
            while piece := os.read(source, PIECE):
                connection._sock.sendall(piece)
            connection._sock.shutdown(socket.SHUT_WR)

    if given is not None:
        threading.Thread(target=feed, args=(given,), daemon=True).start()
    read: Any = frames.frames_iter
    yield from read(connection, tty=False)
