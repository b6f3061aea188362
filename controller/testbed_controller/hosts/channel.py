"""The controller's connection to one host, carried by the engine connection of the docker context.

Each host of a run has a keeper, a container that removes the run from the host if the controller falls silent. In the
keeper, the controller executes a relay, which forwards connections into the containers of the host. The channel opens
a port on this machine's loopback for each container, so that clients on this machine reach the container at a local
URL. Exchanges of time stamps with the relay measure the offset of the host's clock.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docker.errors import APIError

from testbed.common.errors import HostError
from testbed.wire.ports import CONTROL_PORT
from testbed_controller.hosts.contexts import Host
from testbed_controller.hosts.inside.streams import CLOCK, DATA, PIECE, TIMES, Streams
from testbed_controller.lab.clocks import EXCHANGE_SECONDS, MeasuredClock, TimeExchange
from testbed_controller.lab.engineaddress import CERTIFICATES, EngineAddress

RELAY = ["python3", "-m", "testbed_controller.hosts.inside.relay"]
"""Command of the relay in the keeper's container."""
FIRST_EXCHANGES = 32
"""Number of exchanges of time stamps at the start, before the channel is used."""
LOST_SECONDS = 4.0
"""Silence after which a host counts as lost, in seconds."""
# "Connection: Upgrade" asks the engine to carry the input and output of the exec over the connection of the request.
_START_REQUEST = """\
POST /exec/{}/start HTTP/1.1\r
Host: engine\r
Connection: Upgrade\r
Upgrade: tcp\r
Content-Type: application/json\r
Content-Length: 2\r
\r
{{}}"""
_STANDARD_OUTPUT = 1
"""Number of the standard output in the frames of the engine."""
# The engine sends the output of an exec in frames: number of the stream, three empty bytes, and the length.
_FRAME_HEAD = struct.Struct(">BxxxL")

_StreamPair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connect(engine: EngineAddress) -> _StreamPair:
    """Open a byte stream to an engine; raises OSError if the engine does not respond."""
    parts = urlsplit(engine.url)
    if parts.scheme == "unix":
        return await asyncio.open_unix_connection(parts.path)
    context = _make_tls_context(engine)
    return await asyncio.open_connection(parts.hostname, parts.port, ssl=context)


def _make_tls_context(engine: EngineAddress) -> ssl.SSLContext | None:
    if not engine.certificates:
        return None
    ca, certificate, key = (Path(engine.certificates) / name for name in CERTIFICATES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if engine.verify:
        context.load_verify_locations(ca)
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(certificate, key)
    return context


class Channel(MeasuredClock):
    """A connection to the containers of a host, and the measured clock of the host; ended by `close`."""

    def __init__(self, host: Host, keeper: str) -> None:
        """Start a relay in the running container ``keeper``; raises HostError if the keeper does not respond."""
        super().__init__()
        self._last_answer = time.monotonic()
        """Monotonic instant of the latest frame with times of the host, in seconds."""
        self._closed = threading.Event()
        self._ports: dict[int, str] = {}
        """Local URL of the control port of each container, by the ID of the container's first process."""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._loop.run_forever, name=f"{host.name}-channel", daemon=True
        ).start()
        try:
            exec_id = host.client.api.exec_create(keeper, RELAY, stdin=True)["Id"]
            # docker-py cannot start the exec, since its connections block and have no asyncio streams.
            asyncio.run_coroutine_threadsafe(
                self._start_relay(host.address_from_here, exec_id), self._loop
            ).result()
        except (APIError, OSError, EOFError) as error:
            raise HostError(f"{host.name}: cannot reach the keeper: {error}") from error
        deadline = time.monotonic() + 4 * LOST_SECONDS
        while len(self.estimator) < FIRST_EXCHANGES:
            if time.monotonic() > deadline or self._closed.is_set():
                advice = f"see 'docker --context {host.name} logs {keeper}'"
                raise HostError(f"{host.name}: the keeper does not respond: {advice}")
            time.sleep(0.01)

    async def _start_relay(self, engine: EngineAddress, exec_id: str) -> None:
        """Start the relay, the handling of the relay's output, and the exchange of times."""
        reader, self._writer = await _connect(engine)
        self._writer.write(_START_REQUEST.format(exec_id).encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        # 101 Switching Protocols: from here on, the connection carries the input and output of the relay.
        if not answer.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(answer.decode(errors="replace").splitlines()[0])
        self._streams = Streams(self._writer.write, self._record_times)
        relay_output = asyncio.StreamReader(limit=1 << 30)
        # Stored, since event loops hold only weak references to tasks.
        self._tasks = [
            asyncio.ensure_future(self._streams.handle_frames(relay_output)),
            asyncio.ensure_future(self._read_output(reader, relay_output)),
            asyncio.ensure_future(self._exchange_times()),
        ]

    # Connections to containers

    def url(self, _name: str, inspection: Mapping[str, Any]) -> str:
        """Return the local URL of a container's control port; empty for a stopped container.

        ``inspection`` is the engine's description of the container.
        """
        pid = int(inspection["State"]["Pid"])
        if not pid or self._closed.is_set():
            return ""
        with self._lock:
            # A restarted container has a new process and gets a new port: clients recognise the restart by the new URL.
            if pid not in self._ports:
                listening = asyncio.run_coroutine_threadsafe(
                    self._listen_for(pid), self._loop
                )
                self._ports[pid] = f"http://127.0.0.1:{listening.result()}"
            return self._ports[pid]

    async def _listen_for(self, pid: int) -> int:
        """Open a local port leading to the control port of a container; return the number of the local port."""

        async def forward(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await self._streams.open({"pid": pid, "port": CONTROL_PORT}, reader, writer)

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last answer of the host's relay."""
        return time.monotonic() - self._last_answer

    async def _exchange_times(self) -> None:
        # The first frame waits until the relay has started, so further frames follow only after the first answer.
        self._send_time()
        while not len(self.estimator):
            await asyncio.sleep(0.004)
        while not self._closed.is_set():
            is_starting = len(self.estimator) < FIRST_EXCHANGES
            await asyncio.sleep(0.004 if is_starting else EXCHANGE_SECONDS)
            self._send_time()

    def _send_time(self) -> None:
        self._streams.send(CLOCK, 0, TIMES.pack(time.monotonic(), 0.0, 0.0))

    def _record_times(self, times: bytes) -> None:
        self._last_answer = time.monotonic()
        sent, arrived, answered = TIMES.unpack(times)
        self.estimator.add(TimeExchange(sent, arrived, answered, self._last_answer))

    def measure_rate(self, byte_count: int) -> float:
        """Measure the rate to the host in bit/s, with a number of bytes discarded by the relay."""
        measurement = self._send_and_measure(byte_count)
        return asyncio.run_coroutine_threadsafe(measurement, self._loop).result()

    async def _send_and_measure(self, byte_count: int) -> float:
        start = time.monotonic()
        # No connection has the number 0, so the relay discards this data.
        for _ in range(byte_count // PIECE):
            self._streams.send(DATA, 0, bytes(PIECE))
            await self._writer.drain()
        # Frames arrive in order, so the answer to a time frame that follows the data shows that all data has arrived.
        data_sent = time.monotonic()
        self._send_time()
        while (
            self.estimator.last_exchange.sent < data_sent
            and self.silent_seconds < 4 * LOST_SECONDS
        ):
            await asyncio.sleep(0.001)
        return byte_count * 8 / (self.estimator.last_exchange.answer_arrived - start)

    async def _read_output(
        self, reader: asyncio.StreamReader, relay_output: asyncio.StreamReader
    ) -> None:
        """Extract the relay's output from the engine's frames."""
        with suppress(OSError, EOFError):
            while True:
                number, length = _FRAME_HEAD.unpack(
                    await reader.readexactly(_FRAME_HEAD.size)
                )
                content = await reader.readexactly(length)
                if number == _STANDARD_OUTPUT:
                    relay_output.feed_data(content)
                else:
                    # The relay writes errors, such as a traceback, to its standard error.
                    print(content.decode(errors="replace"), end="", flush=True)
        self._closed.set()
        relay_output.feed_eof()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self._loop.call_soon_threadsafe(self._writer.close)
