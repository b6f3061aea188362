"""``python -m testbed_controller.hosts.inside.relay``: the remote end of a controller's connection to a host.

The controller starts the relay in the keeper's container. Both communicate by the protocol of `streams` over the
standard input and output of the relay, which the engine carries. For each connection that the controller opens, the
relay enters the network namespace of a container and connects to a port on its loopback, so nothing has to listen
outside of containers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from testbed_controller.hosts.inside.streams import CLOCK, TIMES, Streams
from testbed_controller.shaping.namespaces import Namespace

ALIVE_FILE = "/run/alive"
"""File touched at every sign of life of the controller; the keeper watches it."""
CONNECT_SECONDS = 5.0
"""Time-out of a connection within a container's namespace, in seconds."""


async def _connect(
    target: dict[str, Any],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a container; ``target`` has the ``pid`` of a process inside, and the ``port``."""
    address = ("127.0.0.1", target["port"])
    connect = partial(socket.create_connection, address, timeout=CONNECT_SECONDS)

    def connect_inside() -> socket.socket:
        namespace = Namespace.of_process(target["pid"])
        try:
            # The socket stays in the namespace in which it was created.
            return namespace.run(connect)
        finally:
            namespace.close()

    loop = asyncio.get_running_loop()
    connection = await loop.run_in_executor(None, connect_inside)
    connection.setblocking(False)
    return await asyncio.open_connection(sock=connection)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    # FlowControlMixin is the smallest protocol for a pipe that is only written.
    transport, _ = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout.buffer
    )

    def answer_clock_frame(times: bytes) -> None:
        arrived = time.monotonic()
        sent, _, _ = TIMES.unpack(times)
        Path(
            ALIVE_FILE
        ).touch()  # touch creates the file if the keeper is still starting
        streams.send(CLOCK, 0, TIMES.pack(sent, arrived, time.monotonic()))

    streams = Streams(transport.write, answer_clock_frame, _connect)
    await streams.handle_frames(reader)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a low priority would distort the clock offsets
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    asyncio.run(_main())
