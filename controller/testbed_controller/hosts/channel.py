"""The controller's connection to one host: an exec of the keeper, over the connection that the engine's context has.

To everybody else in this process it is a port of this machine's loopback for each container of that host. By exchanges
of four time stamps over it the clock of the host is known.
"""

from __future__ import annotations

import asyncio
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import docker
from docker.errors import APIError

from testbed.common.errors import HostError
from testbed.wire.ports import CONTROL_PORT
from testbed_controller.hosts.inside.streams import CLOCK, DATA, HEAD, PIECE, TIMES, Streams
from testbed_controller.lab.clocks import EXCHANGE_SECONDS, MeasuredClock, Sample

RELAY = ["python3", "-m", "testbed_controller.hosts.inside.relay"]
FIRST_EXCHANGES = 32
LOST_SECONDS = 4.0
"""Without an answer, after which a host counts as lost."""
_OUTPUT = 1
"""Number of the stream of standard output, in the engine's frames."""
_HEAD = struct.Struct(">BxxxL")
_NOW = b"now"
"""Stands for an exchange of times, whose frame is made only as it leaves."""


def _clock_frame() -> bytes:
    times = TIMES.pack(time.monotonic(), 0.0, 0.0)
    return HEAD.pack(CLOCK, 0, len(times)) + times


class _Encrypted:
    """A socket with TLS that one thread may read while another writes, which OpenSSL itself does not allow."""

    def __init__(self, inner: ssl.SSLSocket) -> None:
        inner.setblocking(False)
        self._inner = inner
        self._lock = threading.Lock()

    def recv(self, count: int) -> bytes:
        while True:
            with self._lock, suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return self._inner.recv(count)
            select.select([self._inner], [], [])

    def sendall(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            with self._lock, suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                left = left[self._inner.send(left) :]
                continue
            select.select([], [self._inner], [])

    def shutdown(self, how: int) -> None:
        self._inner.shutdown(how)


class Channel(MeasuredClock):
    """Reaches the containers of a host; `close` ends it."""

    def __init__(self, host: str, client: docker.DockerClient, keeper: str) -> None:
        """``keeper`` is the name of the keeper's container, which has to run. Raises HostError where none answers."""
        super().__init__()
        self.host = host
        self._heard = self._arrived = time.monotonic()
        self._over = threading.Event()
        self._ports: dict[int, str] = {}
        self._lock = threading.Lock()
        self._leaving: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            started = client.api.exec_create(keeper, RELAY, stdin=True)["Id"]
            self._exec: Any = client.api.exec_start(started, socket=True)
        except APIError as error:
            raise HostError(f"{host}: its keeper cannot be reached: {error.explanation}") from error
        # The engine's client sets its own time limit on the connection, which may be silent for as long as it likes.
        found: Any = getattr(self._exec, "_sock", self._exec)
        found.settimeout(None)
        self._socket: Any = _Encrypted(found) if isinstance(found, ssl.SSLSocket) else found
        self._loop = asyncio.new_event_loop()
        self._streams = Streams(self._leaving.put, self._note_times)
        self._arriving = asyncio.StreamReader(limit=1 << 30, loop=self._loop)
        self._loop.create_task(self._streams.take_in(self._arriving))
        for work in (self._loop.run_forever, self._read, self._write, self._exchange):
            threading.Thread(target=work, name=f"{host}-{work.__name__}", daemon=True).start()
        deadline = time.monotonic() + 4 * LOST_SECONDS
        while len(self.clock) < FIRST_EXCHANGES:
            if time.monotonic() > deadline or self._over.is_set():
                raise HostError(f"{host}: its keeper does not answer: see 'docker --context {host} logs {keeper}'")
            time.sleep(0.01)

    # To the containers

    def url(self, _name: str, found: Mapping[str, Any]) -> str:
        """Return where the control port of an inspected container is reached; empty when it does not run."""
        pid = int(found["State"]["Pid"])
        if not pid or self._over.is_set():
            return ""
        with self._lock:
            if pid not in self._ports:
                listening = asyncio.run_coroutine_threadsafe(self._listen(pid), self._loop)
                self._ports[pid] = f"http://127.0.0.1:{listening.result()}"
            return self._ports[pid]

    async def _listen(self, pid: int) -> int:
        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._streams.open({"pid": pid, "port": CONTROL_PORT}, reader, writer)

        server = await asyncio.start_server(lead, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    @property
    def silent(self) -> float:
        """Return for how many seconds nothing was heard of the host."""
        return time.monotonic() - self._heard

    def _exchange(self) -> None:
        # What is sent before the relay has started waits for it, and says little of the clocks.
        self._leaving.put(_NOW)
        while not len(self.clock) and not self._over.wait(0.004):
            pass
        while not self._over.wait(0.004 if len(self.clock) < FIRST_EXCHANGES else EXCHANGE_SECONDS):
            self._leaving.put(_NOW)

    def _note_times(self, times: bytes) -> None:
        self._heard = time.monotonic()
        sent, arrived, returned = TIMES.unpack(times)
        self.clock.add(Sample(sent, arrived, returned, self._heard))

    def rate(self, count: int) -> float:
        """Measure how many bit/s reach the host over the connection, by so many bytes that go to nobody."""
        began = time.monotonic()
        for _ in range(count // PIECE):
            self._streams.send(DATA, 0, bytes(PIECE))
        asked = time.monotonic()
        self._leaving.put(_NOW)
        while self.clock.last.sent < asked and self.silent < 4 * LOST_SECONDS:
            time.sleep(0.001)
        return count * 8 / (self.clock.last.back - began)

    # The bytes

    def _read(self) -> None:
        """Take the relay's output out of the engine's frames."""
        with suppress(OSError, struct.error, ValueError):
            while True:
                number, length = _HEAD.unpack(self._exactly(_HEAD.size))
                self._arrived = time.monotonic()
                content = self._exactly(length)
                if number == _OUTPUT:
                    self._loop.call_soon_threadsafe(self._arriving.feed_data, content)
                else:
                    print(content.decode(errors="replace"), end="", flush=True)
        self._over.set()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arriving.feed_eof)

    def _exactly(self, count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            piece = self._socket.recv(count - len(parts))
            if not piece:
                raise OSError("it has ended")
            parts += piece
        return parts

    def _write(self) -> None:
        with suppress(OSError):
            while (frame := self._leaving.get()) is not None:
                self._socket.sendall(_clock_frame() if frame is _NOW else frame)

    def close(self) -> None:
        """End all connections."""
        self._over.set()
        self._leaving.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
            self._exec.close()
